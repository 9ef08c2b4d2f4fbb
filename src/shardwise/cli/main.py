"""The command line: one thin typed function per verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import ShardwiseError, UserError
from shardwise.launch import fork_server
from shardwise.plan.optimizers import OPTIMIZERS, either

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
checkpoints = typer.Typer(help="Look at checkpoints, check them, and turn one into another.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")

ConfigPath = Annotated[Path, typer.Argument(help="TOML config file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as train.steps=20.")
]
Place = Annotated[str, typer.Argument(metavar="PLACE", help="Path or URL: a checkpoint, its run, or another tool's.")]
Calibration = Annotated[Path | None, typer.Option(help="Links as bench comm has measured them.", show_default=False)]
PlannedCluster = Annotated[
    str | None, typer.Option(help="8xA100-80GB, 2x8xH100-SXM, 4xRTX4090@pcie4, or a file; else this machine.")
]
InBackward = Annotated[
    bool, typer.Option("--optimizer-in-backward", help="Step each weight as its gradient is done; no accumulation.")
]
LoraTargets = Annotated[
    str | None, typer.Option(help="all-linear, attention, mlp, or names such as q_proj,v_proj; else all-linear.")
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
    calibration: Calibration = None,
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
    fork_server.start()  # it imports torch for the ranks, while this process plans
    from shardwise.cli.train import run_train

    chosen = [*(overrides or []), *([f"parallel.strategy={strategy}"] if strategy is not None else [])]
    chosen += [f"parallel.nproc={nproc}"] if nproc is not None else []
    run_train(config, chosen, plan_file=plan, master_port=master_port, as_json=json, calibration=calibration)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Argument(help="Catalogue name, config.json or folder, or package.module:factory.", show_default=False),
    ] = None,
    cluster: PlannedCluster = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample.", min=1, max=2**27)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples of a step, all devices.", min=1, max=2**24)] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the whole run, such as 1e12 or 300B.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Only this strategy, such as fsdp+tp2, even if unfit.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples of a forward on a rank.", min=1, max=2**24)] = None,
    recompute: Annotated[str | None, typer.Option(help="Recompute mode: none, selective or full.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8; bf16 where the GPU has it.")] = None,
    optimizer: Annotated[str, typer.Option(help=f"{either(list(OPTIMIZERS))}.")] = "adamw",
    optimizer_in_backward: InBackward = False,
    lora_rank: Annotated[int | None, typer.Option(help="Of +lora and +qlora; else 16.", min=1, max=2**16)] = None,
    lora_targets: LoraTargets = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Blocks run under torch.compile.")] = False,
    loss: Annotated[str, typer.Option(help="plain or fused: a fused loss keeps logits narrow.")] = "plain",
    loss_chunks: Annotated[int, typer.Option(help="Parts that logits are made in.", min=1, max=2**16)] = 1,
    framework_overhead: Annotated[str, typer.Option(help="CUDA context, NCCL buffers, launches: on, off.")] = "on",
    price: Annotated[Path | None, typer.Option(help="TOML file of your own prices: A100-80GB = 1.89 ($/h).")] = None,
    calibration: Calibration = None,
    prove: Annotated[bool, typer.Option("--prove", help="Run the plan's program under fake tensors.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the recommended plan here.")] = None,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json, and stop.")] = False,
) -> None:
    """Will it fit, on what, how fast, for how much: every strategy side by side. Needs no GPU.

    Example: shardwise plan llama-3.1-70b --cluster 8xA100-80GB --seq-len 4096 --global-batch 64
    """
    if schema:
        from shardwise.report.plan_json import json_schema

        print(json_schema())
        return
    if model is None:
        raise UserError("shardwise plan needs a model, such as: shardwise plan llama-3.1-8b --cluster 8xA100-80GB")
    from shardwise.cli.plan import run_plan
    from shardwise.cli.question import Words

    words = Words(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        tokens=tokens,
        strategy=strategy,
        micro_batch=micro_batch,
        recompute=recompute,
        precision=precision,
        optimizer=optimizer,
        optimizer_in_backward=optimizer_in_backward,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        compiled=compiled,
        loss=loss,
        loss_chunks=loss_chunks,
        framework_overhead=framework_overhead,
        price=price,
        calibration=calibration,
        output=output,
    )
    run_plan(words, as_json=json, prove=prove)


@app.command()
def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A file of shardwise plan -o.", show_default=False)],
    why_not: Annotated[str | None, typer.Option(help="A strategy to compare with, such as fsdp+tp2.")] = None,
    loss: Annotated[str | None, typer.Option(help="plain or fused, instead of the plan's.")] = None,
    calibration: Calibration = None,
    json: Json = False,
) -> None:
    """The arithmetic of a plan: each category's formula, phases, time, traffic; and why not another strategy.

    Example: shardwise explain plan.toml --why-not fsdp+tp2
    """
    from shardwise.cli.explain import run_explain

    run_explain(plan_file, not_this=why_not, as_json=json, loss=loss, calibration=calibration)


@app.command("export")
def export_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
    to: Annotated[str, typer.Option(help="deepspeed: the configuration of deepspeed.initialize.")],
    clip_norm: Annotated[float, typer.Option(help="Largest norm of the gradient; 0 is no limit.", min=0)] = 1.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; else stdout.")] = None,
    json: Json = False,
) -> None:
    """A plan as another tool's configuration; what that cannot say is said.

    Example: shardwise export plan.toml --to deepspeed -o ds_config.json
    """
    from shardwise.cli.exchange import run_export

    run_export(plan_file, to=to, clip_norm=clip_norm, output=output, as_json=json)


@app.command("import")
def import_plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A DeepSpeed configuration.", show_default=False)],
    nproc: Annotated[int | None, typer.Option(help="Ranks; else the batch keys must say it.", min=1)] = None,
    cluster: Annotated[str | None, typer.Option(help="Instead of --nproc: 8xA100-80GB, 2xcpu, or a file.")] = None,
    engine: Annotated[str | None, typer.Option(help="deepspeed, or torch for the twin on PyTorch.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sample.", min=1, max=2**27)] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full; the file has no key for it.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the plan here.")] = None,
    json: Json = False,
) -> None:
    """A DeepSpeed configuration as a plan; each key is taken over, or listed with the reason why not.

    Example: shardwise import ds_config.json --nproc 8 -o plan.toml
    """
    from shardwise.cli.exchange import run_import

    run_import(
        file,
        nproc=nproc,
        cluster=cluster,
        engine=engine,
        seq_len=seq_len,
        recompute=recompute,
        output=output,
        as_json=json,
    )


@app.command()
def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Verify only this one, such as fsdp+tp2; may be given several times.", show_default=False),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="CPU ranks to start, whatever devices there are; else 2 and 4.", min=1)
    ] = None,
    json: Json = False,
) -> None:
    """Same gradients as one process, in float64, under each strategy: the config's own model, shrunk, on its own data.

    Example: shardwise verify examples/stdlib.toml --strategy fsdp+tp2 --nproc 4
    """
    from shardwise.cli.verify import run_verify

    run_verify(config, list(overrides or []), strategies=list(strategy or []), nproc=nproc, as_json=json)


@app.command()
def doctor(
    nproc: Annotated[int | None, typer.Option(help="Ranks to check for; a GPU each, or 2 on CPU.", min=1)] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints will go.")] = Path("."),
    timeout: Annotated[float, typer.Option(help="Seconds that ranks have to answer.", min=1, max=86400)] = 60.0,
    json: Json = False,
) -> None:
    """What is wrong with this machine, and the fix: devices, links, ranks that do not answer, limits, disk, versions.

    Example: shardwise doctor --nproc 2
    """
    from shardwise.cli.doctor import run_doctor

    run_doctor(nproc=nproc, folder=folder, timeout_s=timeout, as_json=json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run (train.output).")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Else report.html in it.")] = None,
    scaling: Annotated[Path | None, typer.Option(help="scaling.json of bench scaling, to show it too.")] = None,
    links: Annotated[Path | None, typer.Option(help="Calibration file of bench comm, to show it too.")] = None,
    json: Json = False,
) -> None:
    """One HTML file about a run, with all in it: loss, throughput, where the time went, memory, receipts, findings.

    Example: shardwise report runs/stdlib
    """
    from shardwise.cli.report import run_report

    run_report(run, output=output, scaling=scaling, links=links, as_json=json)


@bench.command()
def step(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each contender.", min=4)] = 60,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Compare only this one, such as fsdp+tp2; may be given several times.", show_default=False),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine.", min=1)] = None,
    bubble: Annotated[bool, typer.Option(help="Also the idle share of a pipeline's stages, by its schedules.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for the raw samples and the plot.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Step time of Shardwise against plain hand-written loops, paired in one process tree; a pipeline's bubble.

    Example: shardwise bench step examples/stdlib.toml --strategy ddp+tp2 --steps 40
    """
    from shardwise.cli.bench import run_bench_step

    chosen = list(overrides or [])
    chosen += [f"parallel.nproc={nproc}"] if nproc is not None else []
    run_bench_step(
        config, chosen, steps=steps, output=output, as_json=json, strategies=list(strategy or []), bubble=bubble
    )


@bench.command()
def comm(
    strategy: Annotated[str, typer.Option(help="Its mesh axes are measured, such as hsdp+tp2.")] = "ddp",
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine; a GPU each, or 2 on CPU.", min=2)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (gloo) or cuda (NCCL).")] = "auto",
    smallest: Annotated[str, typer.Option("--min-size", help="Smallest message.")] = "128B",
    largest: Annotated[str, typer.Option("--max-size", help="Largest message.")] = "64MiB",
    seconds: Annotated[float, typer.Option(help="Seconds for each collective on each axis, at most.", min=0.1)] = 8.0,
    cluster: Annotated[
        str | None, typer.Option(help="What links to expect, such as 2x8xH100/ib400; else what is found here.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for raw samples, calibration and plot.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Speed of the links, axis by axis: bandwidth and latency of every collective, fitted; a file that plan reads.

    Under torchrun it measures the ranks that torchrun has started, on as many nodes as there are.

    Example: shardwise bench comm --nproc 2 --max-size 16MiB
    """
    from shardwise.cli.bench_comm import run_bench_comm

    run_bench_comm(
        strategy=strategy,
        nproc=nproc,
        device=device,
        smallest=smallest,
        largest=largest,
        seconds=seconds,
        output=output,
        as_json=json,
        cluster=cluster,
    )


@bench.command()
def scaling(
    config: ConfigPath,
    overrides: Overrides = None,
    size: Annotated[
        list[int] | None, typer.Option(help="Devices to run on; several times; else 1, 2, 4 ... all.", min=1)
    ] = None,
    mode: Annotated[
        str, typer.Option(help="weak (a batch for each device), strong (one global batch) or both.")
    ] = "both",
    steps: Annotated[int, typer.Option(help="Timed steps at each size.", min=4)] = 40,
    beyond: Annotated[int, typer.Option(help="Predict up to so many devices.", min=1)] = 1024,
    calibration: Annotated[Path | None, typer.Option(help="Links measured by bench comm.", show_default=False)] = None,
    price: Annotated[float | None, typer.Option(help="US dollars for an hour of one device.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the raw samples and the plot.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Throughput on 1, 2, 4 ... devices, weak and strong: efficiency, what is lost to what, what the last one is worth.

    Example: shardwise bench scaling examples/stdlib.toml --size 1 --size 2 --steps 20
    """
    from shardwise.cli.bench_scaling import run_bench_scaling

    run_bench_scaling(
        config,
        list(overrides or []),
        sizes=list(size or []),
        mode=mode,
        steps=steps,
        beyond=beyond,
        calibration=calibration,
        price=price,
        output=output,
        as_json=json,
    )


@bench.command()
def choice(
    configs: Annotated[list[Path], typer.Argument(help="TOML config files.", show_default=False)],
    nproc: Annotated[
        list[int] | None, typer.Option(help="Ranks on this machine; may be given several times.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each strategy.", min=4)] = 20,
    output: Annotated[Path, typer.Option(help="Folder for the raw samples.")] = Path("benchmarks/choice"),
    json: Json = False,
) -> None:
    """The plan that auto takes against every other one that fits, measured on real ranks.

    Example: shardwise bench choice benchmarks/choice/*.toml --nproc 1 --nproc 2 --nproc 4
    """
    from shardwise.cli.choice import run_bench_choice

    run_bench_choice(configs, [], worlds=nproc or [2], steps=steps, output=output, as_json=json)


@bench.command("checkpoint")
def bench_checkpoint(
    config: Annotated[
        Path | None, typer.Argument(help="TOML config file, for its model; else one is made up.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    size: Annotated[
        float | None, typer.Option(help="GiB of weights and optimizer of the model that is made up; 1.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine; 2.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Saves of each contender, under each strategy.", min=1)] = 5,
    step: Annotated[float, typer.Option(help="Seconds that a step of the made-up model takes at least.")] = 0.3,
    output: Annotated[Path, typer.Option(help="Folder for the raw samples and the plot.")] = Path(
        "benchmarks/checkpoint"
    ),
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to be measured; --output.")] = None,
    json: Json = False,
) -> None:
    """Benchmark checkpoint saving against DCP, torch.save and the raw disk: time, stall, and effect on step time.

    Example: shardwise bench checkpoint --size 1 --rounds 7
    """
    from shardwise.cli.bench_checkpoint import run_bench_checkpoint

    run_bench_checkpoint(
        config,
        list(overrides or []),
        size_gib=size,
        nproc=nproc,
        rounds=rounds,
        step_s=step,
        output=output,
        folder=folder,
        as_json=json,
    )


@checkpoints.command("inspect")
def inspect_checkpoint(
    place: Place,
    everything: Annotated[bool, typer.Option("--all", help="A row for each tensor.")] = False,
    json: Json = False,
) -> None:
    """What is in a checkpoint, without reading its data: step, plan, tensors, sizes; and files that cannot be whole.

    Example: shardwise checkpoint inspect runs/stdlib
    """
    from shardwise.cli.checkpoint import run_inspect

    run_inspect(place, everything=everything, as_json=json)


@checkpoints.command("verify")
def verify_checkpoint(place: Place, json: Json = False) -> None:
    """Is every byte what was saved? Reads all of it, and names the file and the tensor that are damaged.

    Example: shardwise checkpoint verify s3://bucket/runs/stdlib
    """
    from shardwise.cli.checkpoint import run_verify

    run_verify(place, as_json=json)


@checkpoints.command("convert")
def convert_checkpoint(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or URL: any tool's checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Path or URL of a folder to make.")],
    to: Annotated[
        str | None,
        typer.Option(help="hf, shardwise or peft (adapters); else hf for a checkpoint of ours, else shardwise."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32 for floating-point weights.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Bytes of a file at most: 5GB, 500MiB.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder with config.json, that file, or package.module:factory.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare every tensor and the outputs of the model.")] = True,
    optimizer: Annotated[bool, typer.Option(help="Carry over the optimizer's state where the target can.")] = True,
    json: Json = False,
) -> None:
    """Turn any tool's checkpoint into a Hugging Face folder or one of ours, and show that it is the same.

    Example: shardwise checkpoint convert runs/stdlib my-model
    """
    from shardwise.cli.convert import run_convert

    run_convert(
        source,
        target,
        to=to,
        dtype=dtype,
        max_shard_size=max_shard_size,
        model=model,
        verify=verify,
        optimizer=optimizer,
        as_json=json,
    )


@checkpoints.command("merge-lora")
def merge_lora(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or URL: a run with +lora or +qlora.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Path or URL of a folder to make.")],
    base: Annotated[str | None, typer.Option(help="Where the base is now; else where the run had it from.")] = None,
    onto: Annotated[str | None, typer.Option(help="+qlora: unpacked (what was trained) or original weights.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder with config.json, that file, or package.module:factory.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; else what the base has.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Bytes of a file at most: 5GB, 500MiB.")] = None,
    check: Annotated[bool, typer.Option(help="Compare outputs with base and adapters, and every tensor.")] = True,
    json: Json = False,
) -> None:
    """Merge the LoRA adapters of a run into their base model, as a Hugging Face folder, and verify the result.

    Example: shardwise checkpoint merge-lora runs/lora -o my-model
    """
    from shardwise.cli.merge import run_merge

    run_merge(
        source,
        output,
        base=base,
        onto=onto,
        model=model,
        dtype=dtype,
        max_shard_size=max_shard_size,
        check=check,
        as_json=json,
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
    print("\n  - ".join([f"shardwise: {len(problems)} problems", *problems]), file=sys.stderr)


if __name__ == "__main__":
    main()
