"""GPUs, links and clusters: what there is to run on. No torch here; models and plans live elsewhere."""
