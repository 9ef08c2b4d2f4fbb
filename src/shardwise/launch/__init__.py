"""Start ranks, watch them, and say which one failed first."""
