"""Plans as DeepSpeed's JSON configuration, and back."""
