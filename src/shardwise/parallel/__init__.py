"""Apply a plan to a live module."""
