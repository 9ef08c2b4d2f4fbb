"""Tensor parallel: find a block's layout, check it against the unsharded block, shard it."""
