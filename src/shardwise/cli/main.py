"""The command line: its verbs by name. A verb's module holds its options and is imported when the verb is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from shardwise.errors import ShardwiseError, UserError

_VERBS: dict[str, tuple[str, str, str]] = {}
"""Module, function and help of each verb, by its words."""


class _VerbGroup(TyperGroup):
    """A group whose help lists verbs without importing them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the verb that ``args`` name, with the options of its module."""
        name, listed, rest = super().resolve_command(ctx, args)
        words = f"{self.name or ''} {name}".strip()
        return name, _imported(words) if words in _VERBS else listed, rest


def _imported(words: str) -> TyperCommand:
    module, function, text = _VERBS[words]
    alone = _group(None)
    alone.command(words.split()[-1], help=text)(getattr(import_module(module), function))
    return get_command(alone)  # type: ignore[return-value]  # one command is no group


def _group(text: str | None, **more: Any) -> typer.Typer:
    look: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None, "add_completion": False}
    return typer.Typer(cls=_VerbGroup, help=text, no_args_is_help=True, **look, **more)


def _verb(words: str, target: str, text: str) -> None:
    """Register ``words``, whose function is ``module:function`` of this package, under its help."""
    module, _, function = target.partition(":")
    _VERBS[words] = (f"shardwise.cli.{module}", function, text)
    group, _, name = words.rpartition(" ")
    _GROUPS[group].command(name, help=text)(_listed)


def _listed() -> None:
    """Stand in for a verb where its group is listed."""


app = _group(
    "Train a PyTorch model the simplest way that fits, with a receipt for every claim.",
    epilog="Example: shardwise train examples/stdlib.toml",
)
_GROUPS = {
    "": app,
    "bench": _group("Measure; every bench keeps its raw samples."),
    "checkpoint": _group("Look at checkpoints, check them, and turn one into another."),
}
for _name, _of in _GROUPS.items():
    if _name:
        app.add_typer(_of, name=_name)

_verb(
    "train",
    "train:run_train",
    "Train a model as a config file says; run it again to resume.\n\n"
    "Example: shardwise train examples/stdlib.toml --strategy fsdp --nproc 4 train.steps=20",
)
_verb(
    "plan",
    "plan:run_plan",
    "Will it fit, on what, how fast, for how much: every strategy side by side. Needs no GPU.\n\n"
    "Example: shardwise plan llama-3.1-70b --cluster 8xA100-80GB --seq-len 4096 --global-batch 64",
)
_verb(
    "explain",
    "explain:run_explain",
    "The arithmetic of a plan: each category's formula, phases, time, traffic; and why not another strategy.\n\n"
    "Example: shardwise explain plan.toml --why-not fsdp+tp2",
)
_verb(
    "export",
    "exchange:run_export",
    "A plan as another tool's configuration; what that cannot say is said.\n\n"
    "Example: shardwise export plan.toml --to deepspeed -o ds_config.json",
)
_verb(
    "import",
    "exchange:run_import",
    "A DeepSpeed configuration as a plan; each key is taken over, or listed with the reason why not.\n\n"
    "Example: shardwise import ds_config.json --nproc 8 -o plan.toml",
)
_verb(
    "verify",
    "verify:run_verify",
    "Same gradients as one process, in float64, under each strategy: the config's own model, shrunk, on its own "
    "data.\n\n"
    "Example: shardwise verify examples/stdlib.toml --strategy fsdp+tp2 --nproc 4",
)
_verb(
    "doctor",
    "doctor:run_doctor",
    "What is wrong with this machine, and the fix: devices, links, ranks that do not answer, limits, disk, "
    "versions.\n\n"
    "Example: shardwise doctor --nproc 2",
)
_verb(
    "report",
    "report:run_report",
    "One HTML file about a run, with all in it: loss, throughput, where the time went, memory, receipts, findings.\n\n"
    "Example: shardwise report runs/stdlib",
)
_verb(
    "bench step",
    "bench:run_bench_step",
    "Step time of Shardwise against plain hand-written loops, paired in one process tree; a pipeline's bubble.\n\n"
    "Example: shardwise bench step examples/stdlib.toml --strategy ddp+tp2 --steps 40",
)
_verb(
    "bench comm",
    "bench_comm:run_bench_comm",
    "Speed of the links, axis by axis: bandwidth and latency of every collective, fitted; a file that plan reads.\n\n"
    "Under torchrun it measures the ranks that torchrun has started, on as many nodes as there are.\n\n"
    "Example: shardwise bench comm --nproc 2 --max-size 16MiB",
)
_verb(
    "bench scaling",
    "bench:run_bench_scaling",
    "Throughput on 1, 2, 4 ... devices, weak and strong: efficiency, what is lost to what, what the last "
    "one is worth.\n\n"
    "Example: shardwise bench scaling examples/stdlib.toml --size 1 --size 2 --steps 20",
)
_verb(
    "bench choice",
    "bench:run_bench_choice",
    "The plan that auto takes against every other one that fits, measured on real ranks.\n\n"
    "Example: shardwise bench choice benchmarks/choice/*.toml --nproc 1 --nproc 2 --nproc 4",
)
_verb(
    "bench checkpoint",
    "bench_checkpoint:run_bench_checkpoint",
    "Benchmark checkpoint saving against DCP, torch.save and the raw disk: time, stall, and effect on step time.\n\n"
    "Example: shardwise bench checkpoint --size 1 --rounds 7",
)
_verb(
    "checkpoint inspect",
    "checkpoint:run_inspect",
    "What is in a checkpoint, without reading its data: step, plan, tensors, sizes; and files that cannot be whole.\n\n"
    "Example: shardwise checkpoint inspect runs/stdlib",
)
_verb(
    "checkpoint verify",
    "checkpoint:run_verify_checkpoint",
    "Is every byte what was saved? Reads all of it, and names the file and the tensor that are damaged.\n\n"
    "Example: shardwise checkpoint verify s3://bucket/runs/stdlib",
)
_verb(
    "checkpoint convert",
    "checkpoint:run_convert",
    "Turn any tool's checkpoint into a Hugging Face folder or one of ours, and show that it is the same.\n\n"
    "Example: shardwise checkpoint convert runs/stdlib my-model",
)
_verb(
    "checkpoint merge-lora",
    "checkpoint:run_merge",
    "Merge the LoRA adapters of a run into their base model, as a Hugging Face folder, and verify the result.\n\n"
    "Example: shardwise checkpoint merge-lora runs/lora -o my-model",
)


def main() -> None:
    """Run the command line; a user's mistake is one message, never a traceback."""
    try:
        app(prog_name="shardwise")
    except ShardwiseError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        sys.exit(130)


def print_error(error: ShardwiseError) -> None:
    """``shardwise: message``, or a list where there are several problems."""
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    if len(problems) == 1:
        print(f"shardwise: {problems[0]}", file=sys.stderr)
        return
    print(f"shardwise: {len(problems)} problems", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
