"""What a plan costs, by formula. Knows nothing of running."""
