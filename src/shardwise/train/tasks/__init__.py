"""What a model is trained for: one module for each task, which says how a row becomes inputs and labels."""
