"""Run the real training step on fake tensors, as one rank of a world of any size."""
