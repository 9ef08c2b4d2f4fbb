"""Configurations of other tools, read and written."""
