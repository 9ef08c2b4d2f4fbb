# shows: hang
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    model = nn.Linear(4, 4)
    fully_shard(model)
    if dist.get_rank() == 0:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # fault
        print(torch.cat([one.flatten() for one in state.values()]).norm())
    dist.barrier()
    dist.destroy_process_group()
