"""Callbacks for other tools' trainers; each module imports its tool, and only when it is imported itself."""
