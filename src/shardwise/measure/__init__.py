"""Observation of real runs.

Imports nothing that predicts, so that both sides stay independent.
"""
