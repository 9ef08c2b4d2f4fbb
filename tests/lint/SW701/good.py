import os

import torch.distributed as dist

os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
dist.init_process_group("nccl")
