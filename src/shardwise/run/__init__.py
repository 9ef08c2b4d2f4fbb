"""Jobs from configuration to summary: prepared once, run by each rank."""
