"""Process groups, meshes, control messages and local tensors, on `torch.distributed`."""
