"""Traces of `torch.profiler`: recorded on request, read, and summarized in words."""
