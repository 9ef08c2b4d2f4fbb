"""Command line: its verbs by name; a verb's module is imported when the verb is called.

The module has the options of the verb.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from shardwise.collector import no_collector
from shardwise.errors import Interrupted, ShardwiseError, UserError

_VERBS: dict[str, tuple[str, str, str]] = {}
"""Module, function and help of each verb, by its words."""


class _VerbGroup(TyperGroup):
    """Command group whose help lists verbs without importing them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the verb that ``args`` name, with the options of its module."""
        name, listed, rest = super().resolve_command(ctx, args)
        words = f"{self.name or ''} {name}".strip()
        return name, _imported(words) if words in _VERBS else listed, rest

    def invoke(self, ctx: Any) -> Any:
        """Import and call the verb; Ctrl-C ends it with a sentence."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs, each with its whole sentence; click would cut it at the width of the terminal."""
        listed = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, (one.help or "").partition("\n\n")[0]) for name, one in listed if one])


class _Verb(TyperCommand):
    """A verb that explains a config key given as an option, and refuses an option given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args``; where an option does not exist and a config key of its name does, show that."""
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
            self._refuse_twice(ctx, given)
            return rest
        except UserError:
            raise
        except Exception as error:  # typer has the class of an option that does not exist under a private name
            if wrong := _number_problem(error):
                raise UserError(wrong) from None
            known = any(parameter.name == "overrides" for parameter in self.params) and hasattr(error, "possibilities")
            if not known:
                raise
            from shardwise.cli.config_options import config_key_hint

            hint = config_key_hint(
                getattr(error, "option_name", ""), given, getattr(error, "possibilities", None) or ()
            )
            if hint is None:
                raise
            raise UserError(hint) from None

    def _refuse_twice(self, ctx: Any, args: list[str]) -> None:
        """Refuse an option of one value that is given several times: the last would win without a word."""
        _, _, order = self.make_parser(ctx).parse_args(args=args)
        single = [one for one in order if hasattr(one, "is_flag") and not one.is_flag and not one.multiple]
        times = Counter(max(one.opts, key=len) for one in single if one.nargs == 1)
        twice = [f"{flag} is given {number} times" for flag, number in times.items() if number > 1]
        if twice:
            raise UserError(*(f"{line}, and takes one value; leave all but one of them out" for line in twice))


def _number_problem(error: Exception) -> str:
    """Say which option's value is not a number of its range; empty where the error is another."""
    param, errors = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if param is None or errors is None:
        return ""
    low, high, first = getattr(param, "min", None), getattr(param, "max", None), errors()[0]
    if low is None and high is None and not first["type"].startswith(("int_", "float_")):
        return ""
    span = f" from {low} to {high}" if None not in (low, high) else "" if low is None else f", {low} or more"
    return f"{param.opts[0]} '{first['input']!s:.20}' must be a number{span}"


@no_collector()
def _imported(words: str) -> TyperCommand:
    module, function, text = _VERBS[words]
    alone = _group(None)
    alone.command(words.split()[-1], cls=_Verb, help=text)(getattr(import_module(module), function))
    return get_command(alone)  # type: ignore[return-value]  # one command is not a group


def _group(text: str | None, **more: Any) -> typer.Typer:
    look: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None, "add_completion": False}
    return typer.Typer(cls=_VerbGroup, help=text, no_args_is_help=True, **look, **more)


def _verb(words: str, target: str, text: str) -> None:
    """Register ``words`` with its help; its function is ``module:function`` of this package."""
    module, _, function = target.partition(":")
    _VERBS[words] = (f"shardwise.cli.{module}", function, text)
    group, _, name = words.rpartition(" ")
    _GROUPS[group].command(name, help=text)(_listed)


def _listed() -> None:
    """Stand in for a verb where its group is listed."""


app = _group(
    "Plan and run distributed PyTorch training with the simplest strategy that fits, and check the result.",
    epilog="Example: shardwise train examples/stdlib.toml",
)


def _print_version(asked: bool) -> None:
    if asked:
        from platform import python_version

        installed = {name: _installed(name) for name in ("shardwise", "torch")}
        print(", ".join(f"{name} {number}" for name, number in installed.items()) + f", Python {python_version()}")
        raise typer.Exit


def _installed(name: str) -> str:
    """Return a package's version without importing it."""
    from importlib.metadata import PackageNotFoundError, version  # both with the package email: a third of --help

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Show versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options before the verb."""


_GROUPS = {
    "": app,
    "bench": _group("Benchmark this machine or a config; raw samples are saved."),
    "checkpoint": _group("Inspect, verify, convert and merge checkpoints."),
    "data": _group("Show what the data of a config becomes."),
}
for _name, _of in _GROUPS.items():
    if _name:
        app.add_typer(_of, name=_name)

_verb(
    "init",
    "init:run_init",
    "Write a commented config that fine-tunes a model on your data, fitted to this machine. Downloads nothing.\n\n"
    "Example: shardwise init ./my-model --data chats.jsonl -o chats.toml",
)
_verb(
    "train",
    "train:run_train",
    "Train a model from a config file; run the same command again to resume.\n\n"
    "Example: shardwise train examples/stdlib.toml --strategy fsdp --nproc 4 train.steps=20",
)
_verb(
    "launch",
    "launch:run_launch",
    "Train on many machines with an engine: torchrun, Slurm, Kubernetes or SkyPilot.\n\n"
    "Example: shardwise launch examples/stdlib.toml --nodes 2 --nproc 4 --via slurm --gpu H100-SXM --dry-run",
)
_verb(
    "plan",
    "plan:run_plan",
    "Predict memory, step time and cost of every strategy for a model on a cluster. Needs no GPU.\n\n"
    "Example: shardwise plan llama-3.1-70b --cluster 8xA100-80GB --seq-len 4096 --global-batch 64",
)
_verb(
    "explain",
    "explain:run_explain",
    "Explain a plan: memory formulas, phases, step time and traffic; and why not another strategy.\n\n"
    "Example: shardwise explain plan.toml --why-not fsdp+tp2",
)
_verb(
    "export",
    "export_plan:run_export",
    "Export a plan as another tool's configuration, or eject it as one file of plain PyTorch; list what is lost.\n\n"
    "Example: shardwise export plan.toml --to pytorch --config examples/stdlib.toml -o train.py",
)
_verb(
    "import",
    "import_plan:run_import",
    "Import another trainer's configuration as a plan and a config; each key is taken, or listed with the reason.\n\n"
    "Example: shardwise import axolotl.yaml --nproc 8 -o plan.toml --config config.toml",
)
_verb(
    "verify",
    "verify:run_verify",
    "Compare the gradients of each strategy with one process, in float64, on the config's model (shrunk) and data.\n\n"
    "Example: shardwise verify examples/stdlib.toml --strategy fsdp+tp2 --nproc 4",
)
_verb(
    "doctor",
    "doctor:run_doctor",
    "Check this machine and suggest fixes: devices, links, unresponsive ranks, limits, disk, versions.\n\n"
    "Example: shardwise doctor --nproc 2",
)
_verb(
    "lint",
    "lint:run_lint",
    "Find what will go wrong on many ranks in training scripts, launch files and configs; nothing is run.\n\n"
    "Example: shardwise lint examples",
)
_verb(
    "report",
    "report:run_report",
    "Write a self-contained HTML report of a run: loss, throughput, step time, memory, receipts, findings.\n\n"
    "Example: shardwise report runs/stdlib",
)
_verb(
    "ui",
    "ui:run_ui",
    "Serve a page on 127.0.0.1: runs, their reports side by side, live metrics, devices, links, and the planner.\n\n"
    "Example: shardwise ui --runs runs",
)
_verb(
    "data preview",
    "data:run_data_preview",
    "Show documents as they are trained on: rendered, with the loss mask in colour, and what was cut or left out.\n\n"
    "Example: shardwise data preview config.toml --html preview.html",
)
_verb(
    "bench step",
    "bench:run_bench_step",
    "Benchmark step time against hand-written loops or other trainers, in alternation, and measure the pipeline "
    "bubble.\n\n"
    "Example: shardwise bench step examples/stdlib.toml --strategy ddp+tp2 --steps 40",
)
_verb(
    "bench comm",
    "bench_comm:run_bench_comm",
    "Measure bandwidth and latency of every collective on each mesh axis, and write a calibration for plan.\n\n"
    "Under torchrun it measures the ranks that torchrun started, on one node or several.\n\n"
    "Example: shardwise bench comm --nproc 2 --max-size 16MiB",
)
_verb(
    "bench scaling",
    "bench:run_bench_scaling",
    "Measure weak and strong scaling on 1, 2, 4 ... devices: efficiency, losses, value of the last device.\n\n"
    "Example: shardwise bench scaling examples/stdlib.toml --size 1 --size 2 --steps 20",
)
_verb(
    "bench choice",
    "bench:run_bench_choice",
    "Compare the plan that auto chooses with every other plan that fits, on real ranks.\n\n"
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
    "Show step, plan, tensors and sizes of a checkpoint without reading its data; detect incomplete files.\n\n"
    "Example: shardwise checkpoint inspect runs/stdlib",
)
_verb(
    "checkpoint verify",
    "checkpoint:run_verify_checkpoint",
    "Read every byte of a checkpoint, compare its hashes, and name damaged files and tensors.\n\n"
    "Example: shardwise checkpoint verify s3://bucket/runs/stdlib",
)
_verb(
    "checkpoint convert",
    "checkpoint:run_convert",
    "Convert any tool's checkpoint to Hugging Face, Shardwise or peft format, and verify the result.\n\n"
    "Example: shardwise checkpoint convert runs/stdlib my-model",
)
_verb(
    "checkpoint merge-lora",
    "checkpoint:run_merge",
    "Merge the LoRA adapters of a run into their base model, as a Hugging Face folder, and verify the result.\n\n"
    "Example: shardwise checkpoint merge-lora runs/lora -o my-model",
)


def main() -> None:
    """Run the command line; a user's error is one message, never a traceback."""
    try:
        app(prog_name="shardwise")
    except ShardwiseError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        sys.exit(130)


def print_error(error: ShardwiseError) -> None:
    """Print ``shardwise: message``, or a list if there are several problems."""
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    if len(problems) == 1:
        print(f"shardwise: {problems[0]}", file=sys.stderr)
        return
    print(f"shardwise: {len(problems)} problems", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
