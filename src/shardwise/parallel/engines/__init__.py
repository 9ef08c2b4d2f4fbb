"""Libraries that run backward, reduction and update themselves (DeepSpeed)."""
