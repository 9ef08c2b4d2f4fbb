"""The decision as data: strategy, degrees, options and the workload. Nothing here computes or predicts."""
