"""Checks, one file for each part of the machine."""
