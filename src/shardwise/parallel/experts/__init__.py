"""Mixtures of experts: the router's own losses, and experts over ranks."""
