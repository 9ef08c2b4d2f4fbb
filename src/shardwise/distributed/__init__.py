"""Process groups, meshes, control messages and local tensors: the lowest layer of `torch.distributed`."""
