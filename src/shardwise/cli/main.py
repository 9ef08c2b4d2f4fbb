"""The command line: one thin typed function per verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import ShardwiseError, UserError
from shardwise.launch import fork_server

app = typer.Typer(
    help="Plan and run distributed PyTorch training with the simplest strategy that fits, and check the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: shardwise train examples/stdlib.toml",
)
bench = typer.Typer(help="Benchmark this machine or a config; raw samples are saved.", no_args_is_help=True)
app.add_typer(bench, name="bench")
checkpoints = typer.Typer(help="Inspect, verify, convert and merge checkpoints.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")

ConfigPath = Annotated[Path, typer.Argument(help="TOML config file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides, such as train.steps=20.")
]
Place = Annotated[str, typer.Argument(metavar="PLACE", help="Path or URL of a run or of any tool's checkpoint.")]
Calibration = Annotated[Path | None, typer.Option(help="Link calibration file from bench comm.", show_default=False)]
PlannedCluster = Annotated[
    str | None, typer.Option(help="8xA100-80GB, 2x8xH100-SXM, 4xRTX4090@pcie4, or a TOML file; default: this machine.")
]
InBackward = Annotated[
    bool, typer.Option("--optimizer-in-backward", help="Update each weight as its gradient is ready; no accumulation.")
]
LoraTargets = Annotated[
    str | None, typer.Option(help="all-linear (default), attention, mlp, or names such as q_proj,v_proj.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document as the last line of stdout; text on stderr.")
]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML config file.", show_default=False)] = None,
    overrides: Overrides = None,
    plan: Annotated[Path | None, typer.Option(help="Use this plan file instead of a search.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="auto, ddp, zero1, zero2, fsdp or hsdp; +tpN, +ppN, +cpN, +offload, +lora, +qlora."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine.", min=1)] = None,
    master_port: Annotated[int, typer.Option(help="Rendezvous port of the ranks; 0 picks a free port.", min=0)] = 0,
    calibration: Calibration = None,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a config file and exit.")] = False,
) -> None:
    """Train a model from a config file; run the same command again to resume.

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
        typer.Argument(help="Catalogue name, config.json, its folder, or package.module:factory.", show_default=False),
    ] = None,
    cluster: PlannedCluster = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sample.", min=1, max=2**27)] = None,
    global_batch: Annotated[int | None, typer.Option(help="Samples per step, all devices.", min=1, max=2**24)] = None,
    tokens: Annotated[str | None, typer.Option(help="Total training tokens, such as 1e12 or 300B.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Only this strategy, such as fsdp+tp2, fitting or not.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples per forward on one rank.", min=1, max=2**24)] = None,
    recompute: Annotated[str | None, typer.Option(help="Recompute mode: none, selective or full.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp32, fp16 or fp8; default: bf16 if supported.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adamw8bit, sgd or adafactor.")] = "adamw",
    optimizer_in_backward: InBackward = False,
    lora_rank: Annotated[int | None, typer.Option(help="Of +lora and +qlora; default: 16.", min=1, max=2**16)] = None,
    lora_targets: LoraTargets = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile blocks with torch.compile.")] = False,
    loss: Annotated[str, typer.Option(help="plain or fused; a fused loss never converts logits to fp32.")] = "plain",
    loss_chunks: Annotated[int, typer.Option(help="Number of chunks of the logits.", min=1, max=2**16)] = 1,
    framework_overhead: Annotated[str, typer.Option(help="Count CUDA context, NCCL, launches: on, off.")] = "on",
    price: Annotated[Path | None, typer.Option(help="TOML file of prices in $/h, such as A100-80GB = 1.89.")] = None,
    calibration: Calibration = None,
    prove: Annotated[bool, typer.Option("--prove", help="Dry run of the plan under fake tensors.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File for the recommended plan.")] = None,
    json: Json = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of --json and exit.")] = False,
) -> None:
    """Predict memory, step time and cost of every strategy for a model on a cluster. Needs no GPU.

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
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file of shardwise plan.", show_default=False)],
    why_not: Annotated[str | None, typer.Option(help="Strategy to compare with, such as fsdp+tp2.")] = None,
    loss: Annotated[str | None, typer.Option(help="plain or fused; default: the plan's.")] = None,
    calibration: Calibration = None,
    json: Json = False,
) -> None:
    """Explain a plan: memory formulas, phases, step time and traffic; and why not another strategy.

    Example: shardwise explain plan.toml --why-not fsdp+tp2
    """
    from shardwise.cli.explain import run_explain

    run_explain(plan_file, not_this=why_not, as_json=json, loss=loss, calibration=calibration)


@app.command("export")
def export_plan(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.", show_default=False)],
    to: Annotated[str, typer.Option(help="Target format: deepspeed (a config for deepspeed.initialize).")],
    clip_norm: Annotated[float, typer.Option(help="Maximum gradient norm; 0 disables clipping.", min=0)] = 1.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Output file; default: stdout.")] = None,
    json: Json = False,
) -> None:
    """Export a plan as another tool's configuration, and list what it cannot express.

    Example: shardwise export plan.toml --to deepspeed -o ds_config.json
    """
    from shardwise.cli.exchange import run_export

    run_export(plan_file, to=to, clip_norm=clip_norm, output=output, as_json=json)


@app.command("import")
def import_plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="DeepSpeed configuration file.", show_default=False)],
    nproc: Annotated[int | None, typer.Option(help="Ranks; default: from the file's batch keys.", min=1)] = None,
    cluster: Annotated[str | None, typer.Option(help="Instead of --nproc: 8xA100-80GB, 2xcpu, or a TOML file.")] = None,
    engine: Annotated[str | None, typer.Option(help="deepspeed, or torch for the equivalent PyTorch strategy.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sample.", min=1, max=2**27)] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective or full (not in the file).")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File for the plan.")] = None,
    json: Json = False,
) -> None:
    """Import a DeepSpeed configuration as a plan; every key is imported, or listed with the reason.

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
        typer.Option(help="Verify only this strategy, such as fsdp+tp2; repeatable.", show_default=False),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of CPU ranks; default: 2 and 4.", min=1)] = None,
    json: Json = False,
) -> None:
    """Compare the gradients of each strategy with one process, in float64, on the config's model (shrunk) and data.

    Example: shardwise verify examples/stdlib.toml --strategy fsdp+tp2 --nproc 4
    """
    from shardwise.cli.verify import run_verify

    run_verify(config, list(overrides or []), strategies=list(strategy or []), nproc=nproc, as_json=json)


@app.command()
def doctor(
    nproc: Annotated[int | None, typer.Option(help="Ranks; default: one per GPU, or 2 on CPU.", min=1)] = None,
    folder: Annotated[Path, typer.Option(help="Folder for checkpoints, whose disk is checked.")] = Path("."),
    timeout: Annotated[float, typer.Option(help="Timeout for answers of ranks, in seconds.", min=1, max=86400)] = 60.0,
    json: Json = False,
) -> None:
    """Check this machine and suggest fixes: devices, links, unresponsive ranks, limits, disk, versions.

    Example: shardwise doctor --nproc 2
    """
    from shardwise.cli.doctor import run_doctor

    run_doctor(nproc=nproc, folder=folder, timeout_s=timeout, as_json=json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder (train.output).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: report.html in the run folder.")
    ] = None,
    scaling: Annotated[Path | None, typer.Option(help="Also show this scaling.json of bench scaling.")] = None,
    links: Annotated[Path | None, typer.Option(help="Also show this calibration file of bench comm.")] = None,
    json: Json = False,
) -> None:
    """Write a self-contained HTML report of a run: loss, throughput, step time, memory, receipts, findings.

    Example: shardwise report runs/stdlib
    """
    from shardwise.cli.report import run_report

    run_report(run, output=output, scaling=scaling, links=links, as_json=json)


@bench.command()
def step(
    config: ConfigPath,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Timed steps per contender.", min=4)] = 60,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Compare only this strategy, such as fsdp+tp2; repeatable.", show_default=False),
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine.", min=1)] = None,
    bubble: Annotated[bool, typer.Option(help="Also measure the pipeline bubble of each schedule.")] = True,
    output: Annotated[Path, typer.Option(help="Folder for raw samples and the plot.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Benchmark step time against hand-written loops, in alternation, and measure the pipeline bubble.

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
    strategy: Annotated[str, typer.Option(help="Strategy whose mesh axes are measured, such as hsdp+tp2.")] = "ddp",
    nproc: Annotated[int | None, typer.Option(help="Ranks here; default: one per GPU, or 2 on CPU.", min=2)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (gloo) or cuda (NCCL).")] = "auto",
    smallest: Annotated[str, typer.Option("--min-size", help="Smallest message size.")] = "128B",
    largest: Annotated[str, typer.Option("--max-size", help="Largest message size.")] = "64MiB",
    seconds: Annotated[float, typer.Option(help="Maximum seconds per collective and axis.", min=0.1)] = 8.0,
    cluster: Annotated[
        str | None, typer.Option(help="Expected links, such as 2x8xH100/ib400; default: detected.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for raw samples, calibration and plot.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Measure bandwidth and latency of every collective on each mesh axis, and write a calibration for plan.

    Under torchrun it measures the ranks that torchrun started, on one node or several.

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
        list[int] | None, typer.Option(help="Number of devices; repeatable; default: 1, 2, 4 ... all.", min=1)
    ] = None,
    mode: Annotated[
        str, typer.Option(help="weak (fixed batch per device), strong (fixed global batch) or both.")
    ] = "both",
    steps: Annotated[int, typer.Option(help="Timed steps per size.", min=4)] = 40,
    beyond: Annotated[int, typer.Option(help="Predict up to this number of devices.", min=1)] = 1024,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration file of bench comm.", show_default=False)
    ] = None,
    price: Annotated[float | None, typer.Option(help="Price of one device in US dollars an hour.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for raw samples and the plot.")] = Path("benchmarks"),
    json: Json = False,
) -> None:
    """Measure weak and strong scaling on 1, 2, 4 ... devices: efficiency, losses, value of the last device.

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
    nproc: Annotated[list[int] | None, typer.Option(help="Ranks on this machine; repeatable.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Timed steps per strategy.", min=4)] = 20,
    output: Annotated[Path, typer.Option(help="Folder for raw samples.")] = Path("benchmarks/choice"),
    json: Json = False,
) -> None:
    """Compare the plan that auto chooses with every other plan that fits, on real ranks.

    Example: shardwise bench choice benchmarks/choice/*.toml --nproc 1 --nproc 2 --nproc 4
    """
    from shardwise.cli.choice import run_bench_choice

    run_bench_choice(configs, [], worlds=nproc or [2], steps=steps, output=output, as_json=json)


@bench.command("checkpoint")
def bench_checkpoint(
    config: Annotated[
        Path | None, typer.Argument(help="TOML config file; default: a synthetic model.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    size: Annotated[
        float | None, typer.Option(help="GiB of weights and optimizer state of the synthetic model; default: 1.")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine; default: 2.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Saves per contender and strategy.", min=1)] = 5,
    step: Annotated[float, typer.Option(help="Minimum step time of the synthetic model, in seconds.")] = 0.3,
    output: Annotated[Path, typer.Option(help="Folder for raw samples and the plot.")] = Path("benchmarks/checkpoint"),
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to measure; default: --output.")] = None,
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
    everything: Annotated[bool, typer.Option("--all", help="Print one row per tensor.")] = False,
    json: Json = False,
) -> None:
    """Show step, plan, tensors and sizes of a checkpoint without reading its data; detect incomplete files.

    Example: shardwise checkpoint inspect runs/stdlib
    """
    from shardwise.cli.checkpoint import run_inspect

    run_inspect(place, everything=everything, as_json=json)


@checkpoints.command("verify")
def verify_checkpoint(place: Place, json: Json = False) -> None:
    """Read every byte of a checkpoint, compare its hashes, and name damaged files and tensors.

    Example: shardwise checkpoint verify s3://bucket/runs/stdlib
    """
    from shardwise.cli.checkpoint import run_verify

    run_verify(place, as_json=json)


@checkpoints.command("convert")
def convert_checkpoint(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or URL of any tool's checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Path or URL of the output folder.")],
    to: Annotated[
        str | None,
        typer.Option(help="hf, shardwise or peft (adapters); default: hf for a Shardwise checkpoint, else shardwise."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of floating-point weights: bf16, fp16 or fp32.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Maximum file size, such as 5GB or 500MiB.")] = None,
    model: Annotated[str | None, typer.Option(help="config.json or its folder, or package.module:factory.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every tensor and the model's outputs.")] = True,
    optimizer: Annotated[bool, typer.Option(help="Convert optimizer state if the target supports it.")] = True,
    json: Json = False,
) -> None:
    """Convert any tool's checkpoint to Hugging Face, Shardwise or peft format, and verify the result.

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
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Path or URL of a run with +lora or +qlora.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Path or URL of the output folder.")],
    base: Annotated[str | None, typer.Option(help="Path or URL of the base model; default: the run's.")] = None,
    onto: Annotated[str | None, typer.Option(help="+qlora: unpacked (as trained) or original weights.")] = None,
    model: Annotated[str | None, typer.Option(help="config.json or its folder, or package.module:factory.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: the base's.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Maximum file size, such as 5GB or 500MiB.")] = None,
    check: Annotated[bool, typer.Option(help="Compare outputs with base plus adapters, and all tensors.")] = True,
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
    print(f"shardwise: {len(problems)} problems", file=sys.stderr)
    for problem in problems:
        print(f"  - {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
