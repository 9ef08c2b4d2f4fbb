"""A job, from its configuration to its summary: prepared once, run by each rank."""
