"""Predicted memory, time and price of a plan, by formula. Nothing here runs a model."""
