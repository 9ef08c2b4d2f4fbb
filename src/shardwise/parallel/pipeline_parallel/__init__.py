"""Pipeline parallel: stages of a model, and their run under PyTorch's schedules."""
