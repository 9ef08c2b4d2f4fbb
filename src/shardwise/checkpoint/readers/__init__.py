"""Read the checkpoints of other tools, each without pickle, behind one interface."""
