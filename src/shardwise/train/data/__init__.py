"""Documents and loaders to micro batches, and the position of a run in its data."""
