import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main():
    dist.init_process_group("gloo")
    state = {"weight": torch.ones(4)}
    place = [tempfile.mkdtemp()]
    dist.broadcast_object_list(place, 0)
    dcp.save(state, checkpoint_id=place[0])
    dist.barrier()
    dist.destroy_process_group()


def accelerated(accelerator):
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.is_main_process:
        accelerator.save_state("checkpoint")
