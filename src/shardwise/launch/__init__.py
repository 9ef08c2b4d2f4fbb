"""Start ranks, watch them, and name the one that failed first."""
