import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM


def build(name, local_rank):
    dist.init_process_group("nccl")
    model = AutoModelForCausalLM.from_pretrained(name, device_map={"": local_rank})
    return DDP(model)
