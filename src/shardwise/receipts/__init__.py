"""Receipts: planned values beside observed ones, for every run."""
