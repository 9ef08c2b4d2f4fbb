"""Scripts that write checkpoints with other tools, each run in a process of its own."""
