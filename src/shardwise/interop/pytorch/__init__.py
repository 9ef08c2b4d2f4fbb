"""A plan and a config as one file of plain PyTorch."""
