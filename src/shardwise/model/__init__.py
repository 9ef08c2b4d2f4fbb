"""Profiles of models (parameters, blocks, operations) from names, configurations or modules.

No `torch.distributed` here, and nothing about sharding.
"""
