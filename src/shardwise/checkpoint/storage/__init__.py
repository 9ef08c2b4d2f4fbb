"""Storage of checkpoints: local folders, object stores, and direct I/O."""
