"""Observe what a run really did; shares no code with the predicting side."""
