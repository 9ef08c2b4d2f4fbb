"""Session, its steps and checks, and the training loop."""
