"""Other tools' checkpoints, read tensor by tensor and without running anything that a file asks for."""
