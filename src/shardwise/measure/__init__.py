"""Observe what a run really does. Imports nothing that predicts, so that the two sides stay independent."""
