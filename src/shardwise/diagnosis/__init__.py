"""Diagnosis of a run's time losses, with evidence, cost and the fix."""
