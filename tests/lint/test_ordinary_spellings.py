"""Ordinary spellings: correct files about which nothing is said, and faults that are found however they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.lint.lint_paths import lint_text
from shardwise.lint.rule import all_rules

JOB = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\n"
MEET = "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$head:29500 a.py"
PORT = "torchrun --nproc-per-node=2 --master-port=29501"


def said(name: str, text: str, folder: Path = Path()) -> list[str]:
    return [f"{one.rule.id}:{one.fault.line}" for one in lint_text(folder / name, text, all_rules())]


RIGHT_LAUNCHES = {
    "each run has GPUs of its own": """CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --standalone --nproc-per-node=4 train.py
CUDA_VISIBLE_DEVICES=0 torchrun --standalone --nproc-per-node=1 eval.py""",
    "GPUs of another branch": """if [ "$1" = one ]; then
  export CUDA_VISIBLE_DEVICES=0
else
  torchrun --standalone --nproc-per-node=4 train.py
fi""",
    "GPUs that are unset": """export CUDA_VISIBLE_DEVICES=0,1
torchrun --standalone --nproc-per-node=2 train.py
unset CUDA_VISIBLE_DEVICES
torchrun --standalone --nproc-per-node=8 train.py""",
    "a semicolon": "export NCCL_DEBUG=INFO; export TORCH_DISTRIBUTED_DEBUG=DETAIL;",
    "a level that a command gives": "export NCCL_DEBUG=`cat level`",
    "one run after the other": f"{PORT} a.py &\nwait\n{PORT} b.py &\nwait",
    "one run or the other": f"if [ $1 = a ]; then\n  {PORT} a.py &\nelse\n  {PORT} b.py &\nfi",
    "one case or the other": f"case $1 in\n  a)\n    {PORT} a.py &\n    ;;\n  b)\n    {PORT} b.py &\n    ;;\nesac",
    "runs of several machines": f"ssh node1 {PORT} a.py &\nssh node2 {PORT} b.py &\nwait",
    "an array one by one": "#SBATCH --array=0-9%1\nexport MASTER_PORT=29500\nsrun python train.py",
    "a port from the task's number": """#SBATCH --array=0-9
MASTER_PORT=29500
torchrun --nproc-per-node=4 --master-port=$(($MASTER_PORT + $SLURM_ARRAY_TASK_ID)) train.py""",
    "a task a node": f"{JOB}srun --ntasks=$SLURM_NNODES {MEET}\nsrun -N2 -n2 {MEET}\nsrun -N1 -n1 -w $head {MEET}",
    "CPUs by -c8": "#SBATCH --cpus-per-task=8\nsrun -c8 python train.py",
    "lines that are no commands": "&\n;\n>&2 echo x\ntorchrun --nproc-per-node\nsrun\n#SBATCH --nodes=\n",
    "digits that are no numbers": "#SBATCH --ntasks=²\nsrun -n ² torchrun --nproc-per-node=² --nnodes=² x.py &",
}


@pytest.mark.parametrize("text", RIGHT_LAUNCHES.values(), ids=RIGHT_LAUNCHES)
def test_nothing_is_said_about_a_launch_file_that_is_right(text: str) -> None:
    assert said("a.sbatch", text) == []


WRONG_LAUNCHES = {
    "variables before the command": ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=4 a.py", "SW706:1"),
    "behind &&": ("cd x && NCCL_DEBUG=LOUD torchrun --nproc-per-node=4 a.py", "SW702:1"),
    "an exported list": ("export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc-per-node=4 a.py", "SW706:2"),
    "tasks of srun": (f"#SBATCH -N 2\nsrun -n16 {MEET}", "SW705:2"),
    "tasks of the job": (f"{JOB}A=1 srun {MEET}", "SW705:5"),
    "an & without a space": (f"{PORT} a.py&\n{PORT} b.py&\nwait", "SW707:2"),
    "two in a line": (f"{PORT} a.py & {PORT} b.py &", "SW707:1"),
}


@pytest.mark.parametrize(("text", "finding"), WRONG_LAUNCHES.values(), ids=WRONG_LAUNCHES)
def test_a_launch_file_that_is_wrong_is_named(text: str, finding: str) -> None:
    assert said("a.sbatch", text) == [finding]


@pytest.mark.parametrize(
    ("script", "findings"),
    [
        ("dist.init_process_group()", ["SW704:1"]),
        ("def main():\n    dist.init_process_group()\nif __name__ == '__main__':\n    main()", ["SW704:1"]),
        ("if args.distributed:\n    dist.init_process_group()", []),
        ("def main(args):\n    if not args.ddp:\n        return\n    dist.init_process_group()\nmain(1)", []),
        ("def setup():\n    dist.init_process_group()\nif n > 1:\n    setup()", []),
        ("try:\n    dist.init_process_group()\nexcept ValueError:\n    pass", []),
    ],
)
def test_a_script_needs_ranks_where_it_always_starts_a_group(tmp_path, script, findings) -> None:
    (tmp_path / "train.py").write_text(f"import torch.distributed as dist\n{script}\n")
    assert said("run.sh", "CUDA_VISIBLE_DEVICES=0,1 python -u train.py\n", tmp_path) == findings


HEAD = """import os
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
"""
RIGHT_SCRIPTS = {
    "one strategy or the other": """
device = torch.device("cuda", 0)
if strategy == "ddp":
    model = model.to(device)
    model = DDP(model, device_ids=[0])
elif strategy == "fsdp":
    model = FSDP(model, device_id=0)
""",
    "a strategy that returns": """
def wrap(model, device, args):
    if args.ddp:
        model.to("cuda")
        return DDP(model)
    fully_shard(model)
    return model
""",
    "a model that is not sharded": "model = model.cuda()\nmodel = FSDP(model, sharding_strategy='NO_SHARD')",
    "a move after the layers": """
for layer in model.layers:
    fully_shard(layer)
model.to("cuda")
fully_shard(model)
""",
    "a save of a process alone": """
model = DDP(model.cuda(0))
if args.distributed:
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "a.pt")
else:
    torch.save(model.module.state_dict(), "a.pt")
""",
    "a group by its place": """
if dist.get_rank() == 0:
    dist.barrier(sub)
    dist.broadcast(x, 0, sub)
    dist.all_reduce(x, dist.ReduceOp.SUM, sub)
""",
    "two scalers": """
first, second = GradScaler("cuda"), GradScaler("cuda")
first.scale(loss).backward()
first.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
first.step(optimizer)
first.update()
second.scale(other).backward()
second.step(other_optimizer)
second.update()
""",
    "two clips by type": """
if fsdp:
    model = FSDP(model, device_id=0)
else:
    model = DDP(model.cuda())
if isinstance(model, FSDP):
    model.clip_grad_norm_(1.0)
else:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "two clips by option": """
if fsdp:
    model = FSDP(model, device_id=0)
if not fsdp:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
elif not x:
    model.clip_grad_norm_(1.0)
""",
    "the state of another type": """
if fsdp:
    model = FSDP(model, device_id=0)
if isinstance(model, FSDP):
    state = model.state_dict()
elif dist.get_rank() == 0:
    state = model.state_dict()
""",
    "the state under the same option": """
if kind == "ddp":
    model = DDP(model.cuda())
elif kind == "fsdp":
    model = FSDP(model, device_id=0)
if kind == "ddp":
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "a.pt")
""",
    "a scaler that a function updates": """
def finish(s):
    s.update()
scaler = GradScaler("cuda")
scaler.scale(loss).backward()
scaler.step(optimizer)
finish(scaler)
""",
    "a scaler that is off": "scaler = GradScaler('cuda', enabled=False)\nscaler.step(optimizer)",
    "a scaler for either type": """
scaler = GradScaler("cuda")
dtype = torch.float16
if torch.cuda.is_bf16_supported():
    dtype = torch.bfloat16
with autocast("cuda", dtype=dtype):
    loss = model(x)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
    "autocast that is off": """
with autocast("cuda"):
    loss = model(x)
    with autocast("cuda", enabled=False):
        loss.backward()
""",
    "a local rank of Slurm": """
parser.add_argument("--local_rank", type=int)
args = parser.parse_args()
args.local_rank = int(os.environ["SLURM_LOCALID"])
dist.init_process_group("nccl")
torch.cuda.set_device(args.local_rank)
""",
}


@pytest.mark.parametrize("text", RIGHT_SCRIPTS.values(), ids=RIGHT_SCRIPTS)
def test_nothing_is_said_about_a_script_that_is_right(text: str) -> None:
    assert said("a.py", HEAD + text) == []


MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.head = {head}

    def forward(self, x):
        {body}
model = DDP(Net(), find_unused_parameters=True)
"""
LINEAR = "nn.Linear(4, 4)"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("nn.ModuleDict({'a': nn.Linear(4, 4)})", "return self.head[task](self.trunk(x))"),
        ("nn.ModuleList([nn.Linear(4, 4)])", "return self.head[0](self.trunk(x))"),
        (LINEAR, "h = self.trunk(x)\n        aux = self.head(h)\n        return h"),
        (LINEAR, "self.head(x)\n        return self.trunk(x)"),
        (LINEAR, "with torch.no_grad():\n            h = self.trunk(x)\n        return self.head(h)"),
        (LINEAR, "return self.head(self.trunk(x).detach())"),
        (LINEAR, "return [self.head(x), self.trunk(x)]"),
        (f"{LINEAR}\n        self.register_parameter('a', nn.Parameter(x))", "return self.head(self.trunk(x))"),
    ],
)
def test_a_model_may_have_unused_parameters(head: str, body: str) -> None:
    assert said("a.py", HEAD + MODEL.format(head=head, body=body)) == []


WRONG_SCRIPTS = {
    "a model that uses all": (
        MODEL.format(head=LINEAR, body="h = self.trunk(x)\n        return self.head(h)"),
        "SW505",
    ),
    "autocast by a name": ("ctx = autocast('cuda')\nwith ctx:\n    model(x).backward()", "SW209"),
    "bfloat16 by its place": (
        "with autocast('cuda', torch.bfloat16):\n    loss = model(x)\nscaler = GradScaler('cuda')\n"
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()",
        "SW604",
    ),
    "a scaler beside a progress bar": (
        "scaler = GradScaler('cuda')\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nbar.update(1)",
        "SW603",
    ),
    "a rank by :=": ("if (rank := dist.get_rank()) == 0:\n    dist.barrier()", "SW302"),
    "a save behind the main guard": (
        "def main():\n    model = DDP(Net().cuda(0))\n    torch.save(model.module.state_dict(), 'a.pt')\n"
        "if __name__ == '__main__':\n    main()",
        "SW401",
    ),
    "a class that shards and has a property": (
        """
class Trainer:
    def __init__(self):
        self.rank = dist.get_rank()
        self.model = Net()
        fully_shard(self.model)

    @property
    def writes(self):
        return self.rank == 0

    def save(self):
        if self.writes:
            torch.save(self.model.state_dict(), "a.pt")
""",
        "SW402",
    ),
    "moved in the same branch": ("if fsdp:\n    model.cuda()\n    fully_shard(model)", "SW513"),
    "clipped in the same branch": (
        "if fsdp:\n    model = FSDP(model)\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "SW601",
    ),
}


@pytest.mark.parametrize(("text", "id"), WRONG_SCRIPTS.values(), ids=WRONG_SCRIPTS)
def test_a_script_that_is_wrong_is_named(text: str, id: str) -> None:
    assert [one.partition(":")[0] for one in said("a.py", HEAD + text)] == [id]


def test_a_config_of_another_program_is_no_config_of_shardwise() -> None:
    assert said("a.toml", "[model]\nhidden = 1\n[data]\ncsv = 'a'\n[train]\nlearning_rate = 1\n[wandb]\n") == []
    assert said("a.yaml", "kind: Service\n---\nkind: Job\n") == []
    assert said("a.yaml", "x: !Ref y\nz: !!python/name:a.b\n") == []
