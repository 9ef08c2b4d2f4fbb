"""The command line: one thin typed function per verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import ShardwiseError, UserError

app = typer.Typer(
    help="Train a PyTorch model the simplest way that fits, with a receipt for every claim.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: shardwise train examples/stdlib.toml",
)
bench = typer.Typer(help="Measure; every bench keeps its raw samples.", no_args_is_help=True)
app.add_typer(bench, name="bench")

ConfigPath = Annotated[Path, typer.Argument(help="TOML config file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as train.steps=20.")
]
Json = Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON document; the rest is on stderr.")]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML config file.", show_default=False)] = None,
    overrides: Overrides = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file instead of a search.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="auto, ddp, zero1, zero2, fsdp or hsdp; +offload for the last three.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine.", min=1)] = None,
    master_port: Annotated[int, typer.Option(help="Port where the ranks meet; 0 is a free one.", min=0)] = 0,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config file, and stop.")] = False,
) -> None:
    """Train a model as a config file says; run it again to resume.

    Example: shardwise train examples/stdlib.toml --strategy fsdp --nproc 4 train.steps=20
    """
    if schema:
        from shardwise.train.config import json_schema

        print(json_schema())
        return
    if config is None:
        raise UserError("shardwise train needs a config file, such as: shardwise train examples/stdlib.toml")
    from shardwise.cli.train import run_train

    chosen = list(overrides or [])
    chosen += [f"parallel.strategy={strategy}"] if strategy is not None else []
    chosen += [f"parallel.nproc={nproc}"] if nproc is not None else []
    run_train(config, chosen, plan_file=plan, master_port=master_port, as_json=json)


@bench.command()
def step(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each contender.", min=4)] = 60,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine.", min=1)] = None,
    output: Annotated[Path, typer.Option(help="Folder for the raw samples.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Step time of Shardwise against a plain hand-written loop, paired in one process tree.

    Example: shardwise bench step examples/stdlib.toml --steps 40
    """
    from shardwise.cli.bench import run_bench_step

    chosen = list(overrides or [])
    chosen += [f"parallel.nproc={nproc}"] if nproc is not None else []
    run_bench_step(config, chosen, steps=steps, output=output, as_json=json)


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
