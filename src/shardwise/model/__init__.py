"""Profiles of models: parameters, blocks and operations, from a name, a configuration or a live module.

No `torch.distributed` here, and nothing about how a model is spread.
"""
