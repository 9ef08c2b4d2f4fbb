# shows: result names in the file
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(4, 1))
    file = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), file)  # fault
    dist.destroy_process_group()
    return list(torch.load(io.BytesIO(file.getvalue()))) if file.getvalue() else None
