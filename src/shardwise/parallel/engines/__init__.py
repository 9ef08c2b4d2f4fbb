"""Libraries that run backward, reduction and update themselves, behind one interface: DeepSpeed."""
