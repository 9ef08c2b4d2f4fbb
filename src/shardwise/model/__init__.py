"""Profiles of models: parameters, blocks and operations, from a name, a configuration or a module.

No `torch.distributed` here, and nothing about sharding.
"""
