"""Additional optimizers, steps during the backward, and the check of a sharded optimizer."""
