"""Facts: the model, the cluster, the workload. Nothing here decides or runs anything."""
