"""Choose a plan: enumerate the strategies, cost them, rank them, and explain each rejection."""
