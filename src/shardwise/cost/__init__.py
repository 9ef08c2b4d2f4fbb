"""Predicted memory, time and price of a plan, by formula, without running a model."""
