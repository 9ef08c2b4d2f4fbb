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
