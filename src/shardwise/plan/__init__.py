"""Plan data: strategy, degrees, options and workload. Nothing here computes or predicts."""
