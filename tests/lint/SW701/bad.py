import os

import torch.distributed as dist

os.environ["NCCL_ASYNC_ERROR_HANDLING"] = "0"  # fault
os.environ.setdefault("NCCL_BLOCKING_WAIT", "1")  # fault
dist.init_process_group("nccl")
