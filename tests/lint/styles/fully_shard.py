"""fully_shard over a device mesh, blocks compiled one by one, distributed checkpoints: the way of torchtitan."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import Transformer, TransformerConfig, batches
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model, mesh):
    for block in model.layers.values():
        block.compile(fullgraph=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class Trainer:
    def __init__(self, accumulation):
        self.device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}")
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl")
        self.mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        with torch.device("meta"):
            self.model = Transformer(TransformerConfig())
        parallelize(self.model, self.mesh)
        self.model.to_empty(device=self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)
        self.accumulation = accumulation

    def step(self, window, tokens):
        self.optimizer.zero_grad()
        for place, (x, labels) in enumerate(window):
            self.model.set_requires_gradient_sync(place == len(window) - 1)
            loss = torch.nn.functional.cross_entropy(self.model(x), labels, ignore_index=-100, reduction="sum") / tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach(), norm

    def train(self, steps):
        for number, (window, tokens) in enumerate(batches(steps, self.mesh.get_local_rank(), self.accumulation)):
            loss, norm = self.step(window, tokens)
            if number % 10 == 0 and dist.get_rank() == 0:
                dist.all_reduce(loss)  # SW301: the other ranks do not take part
                print(number, loss.item(), norm.full_tensor().item())
            if number % 1000 == 0:
                model, optimizer = get_state_dict(self.model, self.optimizer)
                dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"step-{number}")
        self.export()

    def export(self):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, "model.pt")


if __name__ == "__main__":
    Trainer(4).train(10000)
    dist.destroy_process_group()
