"""GPUs, links and clusters, without torch, models or plans."""
