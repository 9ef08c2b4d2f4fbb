"""A plan as DeepSpeed's JSON configuration, and back."""
