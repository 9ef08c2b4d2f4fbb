"""Choose a plan: enumerate, prune by memory, keep every reason."""
