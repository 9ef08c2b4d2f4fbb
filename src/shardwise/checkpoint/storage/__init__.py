"""Where checkpoints lie: local folders, object stores, and direct I/O."""
