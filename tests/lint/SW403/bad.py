# shows: hang
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main():
    dist.init_process_group("gloo")
    state = {"weight": torch.ones(4)}
    if dist.get_rank() == 0:
        dcp.save(state, checkpoint_id=tempfile.mkdtemp())  # fault
    dist.barrier()
    dist.destroy_process_group()
