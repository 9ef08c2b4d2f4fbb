"""Optimizers that PyTorch lacks, steps during the backward, and the trial that a sharded optimizer must pass."""
