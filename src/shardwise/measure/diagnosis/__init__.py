"""What a run loses time to, in sentences."""
