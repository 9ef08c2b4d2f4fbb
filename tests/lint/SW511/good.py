import os
import tempfile

import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    folder = tempfile.mkdtemp()
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.init_process_group("nccl")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": local_rank})
    dist.destroy_process_group()
    return sorted({str(one.device) for one in model.parameters()})
