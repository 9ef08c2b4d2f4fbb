"""Watchdog of a run: heartbeats of the ranks, a monitor beside them, and a verdict when they stop moving."""
