"""`shardwise verify`: gradients of each strategy against those of one process."""
