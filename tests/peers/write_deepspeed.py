"""Train a small model with real DeepSpeed on gloo ranks and save it: ``python write_deepspeed.py FOLDER``.

For each case there is ``FOLDER/<case>`` as DeepSpeed wrote it, and beside it ``<case>.safetensors`` with what the ranks
held: gathered fp32 masters and optimizer state, as DeepSpeed's own functions for that give them.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 100.0
STEPS = 2


@dataclass(frozen=True)
class Case:
    """One checkpoint; ``zero`` is added to DeepSpeed's ``zero_optimization`` table, ``config`` to its top level."""

    name: str
    world: int
    stage: int
    bf16: bool = False
    one_group: bool = False
    named: bool = False
    optimizer: str = "AdamW"
    frozen: bool = True
    zero: tuple[tuple[str, object], ...] = ()
    config: tuple[tuple[str, object], ...] = ()
    client: tuple[tuple[str, object], ...] = ()


CASES = (
    Case("stage1-fp32-1", 1, 1),
    Case("stage3-bf16-1", 1, 3, bf16=True),
    Case("stage0-fp32-1", 1, 0, named=True),
    Case("stage0-fp32-2", 2, 0),
    Case("stage0-bf16-2", 2, 0, bf16=True, one_group=True, frozen=False),
    Case("stage1-bf16-2", 2, 1, bf16=True),
    Case("stage1-bf16-fp32grads-2", 2, 1, bf16=True, config=(("data_types", {"grad_accum_dtype": "fp32"}),)),
    Case("stage2-fp32-2", 2, 2, client=(("epoch", 7), ("note", "from the caller"))),
    Case("stage2-elastic-2", 2, 2, bf16=True, zero=(("elastic_checkpoint", True), ("round_robin_gradients", True))),
    Case("stage3-fp32-2", 2, 3, zero=(("stage3_param_persistence_threshold", 0),)),
    Case("stage1-fp32-3", 3, 1),
    Case("stage2-bf16-3", 3, 2, bf16=True, zero=(("parameter_alignment", True),)),
    Case("stage3-fp32-3", 3, 3, zero=(("sub_group_size", 40),)),
    Case("stage3-bf16-3", 3, 3, bf16=True),
    Case("stage1-sgd-1", 1, 1, optimizer="SGD"),
)
_SWAPPED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}
REFUSED = (  # real files, in which the caller's own state stands for what one rank without NVMe cannot have
    Case("refused-quantized", 1, 1, optimizer="Quantized"),
    Case("refused-parallel", 1, 1, client=(("mp_world_size", 2),)),
    Case("refused-mics", 1, 1, client=(("ds_config", {"zero_optimization": {"mics_shard_size": 2}}),)),
    Case("refused-nvme", 1, 1, client=(("ds_config", _SWAPPED),)),
    Case("refused-experts", 1, 1, client=(("ds_autoep_layers", [{"num_experts": 4}]),)),
)
STATE = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


def main(folder: Path) -> int:
    """Write every case, one world after another, on ranks that are forks of this process; 0 when all went well."""
    import deepspeed.ops
    import deepspeed.runtime.zero.muon.muon_optimizer  # ZeRO imports it, and it takes long: before the forks

    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled, and no compiler is asked whether it could be
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + TIMEOUT_S
    for world in sorted({case.world for case in (*CASES, *REFUSED)}):
        ranks = {_fork(rank, world, folder): rank for rank in range(world)}
        failed = False
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                failed |= status != 0
                del ranks[pid]
            elif failed or time.monotonic() > deadline:
                for pid in ranks:
                    os.kill(pid, 9)
                    os.waitpid(pid, 0)
                print(f"stopped ranks {sorted(ranks.values())} of {world}", file=sys.stderr)
                return 1
            else:
                time.sleep(0.005)
        if failed:
            return 1
    return 0


def _fork(rank: int, world: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        _run_rank(rank, world, folder)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own exit races with gloo's threads


def _run_rank(rank: int, world: int, folder: Path) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(dict(zip(names, map(str, (rank, world, rank, world)), strict=True)))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
    deepspeed.init_distributed(dist_backend="gloo")
    for case in (*CASES, *REFUSED):
        if case.world == world:
            _write(case, rank, folder)
    dist.barrier()


def _model(frozen: bool, with_empty: bool):
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.norm = nn.LayerNorm(6)
            self.up = nn.Linear(6, 9)
            self.down = nn.Linear(9, 6, bias=False)
            self.fixed = nn.Linear(6, 6)
            self.fixed.requires_grad_(not frozen)
            self.cube = nn.Parameter(torch.randn(3, 5, 2) * 0.1)
            if with_empty:
                self.nothing = nn.Parameter(torch.empty(0, 4))
                self.nil = nn.Parameter(torch.empty(0, 4))
            self.gain = nn.Parameter(torch.ones(1))
            self.shift = nn.Parameter(torch.tensor([[0.25]]))
            self.register_buffer("seen", torch.tensor(3))
            self.register_buffer("scale", torch.tensor([[0.5, 1.5, 2.5]]))
            self.register_buffer("forgotten", torch.ones(2), persistent=False)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.norm(self.embed(ids))
            x = x + self.down(torch.relu(self.up(x))) * self.gain + self.fixed(x) + self.shift
            return self.head(x) + self.cube.sum() * self.scale.mean()

    torch.manual_seed(0)
    return Model()


def _optimizer(name: str, groups):
    import torch

    class Quantized(torch.optim.SGD):
        """Keeps its state as those with 8 bits do."""

        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["state1"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    self.state[parameter]["absmax1"] = torch.ones(3)

    if name == "Quantized":
        return Quantized(groups, lr=0.01)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01)


def _write(case: Case, rank: int, folder: Path) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    model = _model(case.frozen, with_empty=case.stage < 3)  # stage 3 fails on an empty parameter
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    members = [(name, p) if case.named else p for name, p in named.items()]
    groups = [
        {"params": [m for m, p in zip(members, named.values(), strict=True) if p.dim() > 1], "weight_decay": 0.1},
        {"params": [m for m, p in zip(members, named.values(), strict=True) if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = _optimizer(case.optimizer, [{"params": members}] if case.one_group else groups)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case.stage, **dict(case.zero)},
        "bf16": {"enabled": case.bf16},
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01}},
        "zero_allow_untested_optimizer": True,
        **dict(case.config),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(0, 11, (2, 4), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
    expected = _held(engine, case)
    engine.save_checkpoint(str(folder / case.name), client_state=dict(case.client))
    if rank == 0:
        save_file({name: tensor.clone() for name, tensor in expected.items()}, folder / f"{case.name}.safetensors")
    engine.destroy()
    dist.barrier()


def _held(engine, case: Case):
    """What the ranks hold together, whole, by the names that Shardwise gives."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False  # with several groups only the first one was linked
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    held = {f"model/{name}": b.clone() for name, b in engine.module.named_buffers() if name != "forgotten"}
    if case.stage == 0:
        return held | _held_unsharded(engine, case.bf16)
    if ("round_robin_gradients", True) in case.zero:
        for name, parameter in engine.module.named_parameters():
            held[f"model/{name}"] = held[f"rounded/{name}"] = parameter.detach().clone()
        return held | _held_in_partitions(engine.optimizer, {id(p): n for n, p in engine.module.named_parameters()})
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=case.stage == 3):
            held[f"model/{name}"] = parameter.detach().clone()
        held[f"rounded/{name}"] = held[f"model/{name}"]
        if parameter.requires_grad and held[f"model/{name}"].numel():
            shape = held[f"model/{name}"].shape
            held[f"model/{name}"] = safe_get_full_fp32_param(parameter).clone().reshape(shape)
            for key in STATE.get(case.optimizer, ()):
                held[f"optimizer/{name}/{key}"] = safe_get_full_optimizer_state(parameter, key).clone().reshape(shape)
    return held


def _held_in_partitions(optimizer, name_of):
    """The same for stages 1 and 2, where the functions above take one parameter for another (DeepSpeed 0.19.8)."""
    import torch
    import torch.distributed as dist

    held = {}
    for partition, parameters in zip(
        optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups, strict=True
    ):
        state = optimizer.optimizer.state[partition]
        for key, mine in {
            "": partition.detach(),
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
        }.items():
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            for parameter, value in zip(parameters, optimizer.unflatten(torch.cat(parts), parameters), strict=True):
                name = name_of[id(parameter)]
                held[f"optimizer/{name}/{key}" if key else f"model/{name}"] = value.clone()
    return held


def _held_unsharded(engine, bf16: bool):
    """The same without ZeRO, where each rank has everything."""
    name_of = {id(p): name for name, p in engine.module.named_parameters()}
    held = {f"model/{name}": p.detach().clone() for name, p in engine.module.named_parameters()}
    inner = engine.optimizer.optimizer if bf16 else engine.optimizer
    masters = [p for group in inner.param_groups for p in group["params"]]
    weights = [p for group in engine.optimizer.fp16_groups for p in group] if bf16 else masters
    for weight, master in zip(weights, masters, strict=True):
        held[f"model/{name_of[id(weight)]}"] = master.detach().clone()
        for key, value in inner.state[master].items():
            held[f"optimizer/{name_of[id(weight)]}/{key}"] = value.clone()
    return held


if __name__ == "__main__":
    os.environ.update(DS_ACCELERATOR="cpu", TORCHINDUCTOR_COMPILE_THREADS="1")
    sys.exit(main(Path(sys.argv[1])))
