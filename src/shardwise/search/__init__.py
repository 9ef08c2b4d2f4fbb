"""Choose a plan: enumerate the strategies, estimate costs, rank, and explain each rejection."""
