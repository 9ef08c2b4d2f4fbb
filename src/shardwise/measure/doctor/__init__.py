"""The checks of ``shardwise doctor``."""
