"""Traces of `torch.profiler`: recorded on request, read, and summed up in words."""
