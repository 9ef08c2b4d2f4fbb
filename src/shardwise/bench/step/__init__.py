"""Step time against a hand-written loop, and the pipeline bubble."""
