"""`shardwise verify`: compare gradients of each strategy with those of one process."""
