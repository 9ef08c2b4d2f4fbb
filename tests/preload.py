"""Imported once by the fork server, so that each rank of a test starts with it loaded."""

import torch.distributed.optim  # noqa: F401
