"""Convert checkpoints, merge adapters, and check that the result computes the same."""
