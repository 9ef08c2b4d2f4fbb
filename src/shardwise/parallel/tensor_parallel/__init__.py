"""Tensor parallel: find the layout of a block, check it against the unsharded block, and shard it."""
