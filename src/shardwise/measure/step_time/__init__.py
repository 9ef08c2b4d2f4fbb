"""Step time by component, on every rank and every step."""
