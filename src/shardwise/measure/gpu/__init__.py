"""What GPUs say of themselves."""
