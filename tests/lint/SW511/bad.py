import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM


def build(name):
    dist.init_process_group("nccl")
    model = AutoModelForCausalLM.from_pretrained(name, device_map="auto")  # fault
    return DDP(model)
