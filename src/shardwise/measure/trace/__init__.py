"""A profiler's trace of some steps, and what it says in words."""
