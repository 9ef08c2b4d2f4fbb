"""Start ranks, monitor them, and report the one that failed first."""
