"""Planned values beside found ones, for every run."""
