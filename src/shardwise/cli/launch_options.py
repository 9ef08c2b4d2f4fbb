"""Options of ``shardwise launch`` that belong to some engines only; those of another engine are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shardwise.units import listed


@dataclass(frozen=True)
class EngineOption:
    """Option of some ``engines``: its help, and the type that Typer reads."""

    engines: tuple[str, ...]
    help: str
    kind: Any = str | None
    flag: str = ""
    usual: Mapping[str, Any] | None = None


MANIFESTS, CLOUD = ("kubernetes",), ("skypilot",)
ENGINE_OPTIONS: dict[str, EngineOption] = {
    "hosts": EngineOption(("torchrun",), "Host names a,b: started over ssh; without them the lines are printed."),
    "endpoint": EngineOption(("torchrun",), "HOST:PORT of the first node; default: the first of --hosts, or this one."),
    "partition": EngineOption(("slurm",), "Partition of the job."),
    "account": EngineOption(("slurm",), "Account that is charged."),
    "qos": EngineOption(("slurm",), "Quality of service."),
    "time": EngineOption(("slurm",), "Time limit, such as 24:00:00; the run saves before it and is queued again."),
    "sbatch_option": EngineOption(
        ("slurm",), "Any other option of sbatch, as KEY=VALUE; repeatable.", list[str] | None
    ),
    "doctor": EngineOption(
        ("slurm",),
        "Check all nodes before the first start (default) or not.",
        bool | None,
        "--doctor/--no-doctor",
        {"slurm": True},
    ),
    "setup": EngineOption(
        ("slurm", "skypilot"), "Shell line before the run, such as 'module load cuda'; repeatable.", list[str] | None
    ),
    "kind": EngineOption(
        ("kubernetes", "skypilot"),
        "trainjob (Kubeflow Trainer) or jobset on kubernetes; managed or cluster on skypilot.",
        usual={"kubernetes": "trainjob", "skypilot": "managed"},
    ),
    "image": EngineOption(("kubernetes", "skypilot"), "Container image with Shardwise."),
    "namespace": EngineOption(MANIFESTS, "Namespace of the job."),
    "storage_claim": EngineOption(MANIFESTS, "PersistentVolumeClaim for data, run folder and checkpoints."),
    "storage_path": EngineOption(
        ("kubernetes", "skypilot"),
        "Where the storage is mounted; relative paths of the config begin there.",
        usual={"kubernetes": "/workspace", "skypilot": "/storage"},
    ),
    "volume": EngineOption(CLOUD, "Volume (sky volumes) for data, run folder and checkpoints."),
    "bucket": EngineOption(CLOUD, "Bucket instead of a volume, such as s3://my-bucket."),
    "accelerator": EngineOption(CLOUD, "SkyPilot's name of the GPU, where it is not that of --gpu."),
    "infra": EngineOption(CLOUD, "Cloud, region or cluster, such as aws/us-east-1."),
    "spot": EngineOption(CLOUD, "Rent machines that may be taken away.", bool | None, "--spot"),
}


def with_engine_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Give ``verb`` the options of all engines after its own; it receives them as a mapping."""

    def command(**words: Any) -> None:
        verb({name: words.pop(name) for name in ENGINE_OPTIONS}, **words)

    alone = inspect.Parameter.KEYWORD_ONLY
    _, *own = inspect.signature(verb, eval_str=True).parameters.values()
    options = [
        inspect.Parameter(name, alone, default=None, annotation=Annotated[one.kind, _typer_option(name, one)])
        for name, one in ENGINE_OPTIONS.items()
    ]
    signature = inspect.Signature([*(parameter.replace(kind=alone) for parameter in own), *options])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def engine_options(given: Mapping[str, Any], via: str) -> tuple[dict[str, Any], list[str]]:
    """Return the options of the engine ``via`` with their defaults, and a problem for each of another one."""
    problems = [
        f"{option_word(name)} belongs to --via {' and '.join(one.engines)}, and this is {via}; remove it"
        for name, one in ENGINE_OPTIONS.items()
        if given[name] is not None and via not in one.engines
    ]
    problems += [
        f"{option_word(name)} is empty; give a value, or leave it out"
        for name, value in given.items()
        if isinstance(value, str) and not value.strip()
    ]
    own = {
        name: (one.usual or {}).get(via) if given[name] is None else given[name]
        for name, one in ENGINE_OPTIONS.items()
        if via in one.engines
    }
    return own, problems


def option_word(name: str) -> str:
    """Return an option as it is typed."""
    return "--" + name.replace("_", "-")


def _typer_option(name: str, one: EngineOption) -> Any:
    return typer.Option(one.flag or option_word(name), help=f"{one.help} [{listed(one.engines)}]", show_default=False)
