"""`shardwise doctor`: check this machine, and its ranks, before a run."""
