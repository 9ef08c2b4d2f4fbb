"""Check a launch before anything is planned or rendered; all problems are reported at once."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from shardwise.cli.launch_options import engine_options
from shardwise.cli.train import given_plan
from shardwise.errors import PlanError, UserError, did_you_mean
from shardwise.hardware.cluster import ClusterSpec, detect
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.launch.engines.known_engines import ENGINES, LaunchEngine
from shardwise.launch.engines.kubernetes import CONFIG_FOLDER
from shardwise.launch.engines.launch_request import LaunchRequest, job_name
from shardwise.launch.engines.skypilot import config_folder
from shardwise.plan.optimizers import either
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.search.plan_request import tried
from shardwise.train.config import Config, read_config

CORES_OF_GPU = 8
USUAL_RESTARTS = 10
UNKNOWN_GPU = "GPU of unknown type"
_SHARED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "glusterfs", "afs", "9p",
           "virtiofs", "panfs", "orangefs", "pvfs2"}  # fmt: skip
_SHARED_PREFIX = "fuse."


@dataclass(frozen=True)
class LaunchWords:
    """Options of the command line that all engines have."""

    config_file: Path
    overrides: list[str]
    nodes: int
    via: str
    nproc: int | None
    gpu: str | None
    plan_file: Path | None
    name: str | None
    interface: str | None
    env: list[str]
    cores: int | None
    python: str | None
    restarts: int | None
    grace_s: int
    output: Path | None
    dry_run: bool
    as_json: bool


@dataclass(frozen=True)
class Launch:
    """Checked launch: the config, the engine with its options, and the machines."""

    words: LaunchWords
    config: Config
    engine: LaunchEngine
    options: Mapping[str, Any]
    plan: Plan | None
    cluster: ClusterSpec
    notes: tuple[str, ...]

    @property
    def nproc(self) -> int:
        """Ranks on each machine."""
        return self.cluster.devices_per_node

    @property
    def name(self) -> str:
        """Name of the job."""
        return job_name(self.words.name or Path(self.config.train.output).name)

    def header(self, request: LaunchRequest) -> str:
        """Return the first line of the file: what made it, for how many ranks."""
        ranks = f"{request.nodes} node{'s' if request.nodes > 1 else ''} × {request.nproc} = "
        return (
            f"Made by shardwise launch from {json.dumps(str(self.words.config_file))}: "
            f"{ranks}{request.nodes * request.nproc} rank{'s' if request.nodes * request.nproc > 1 else ''}."
        )

    def request(self, strategy: str | None = None) -> LaunchRequest:
        """Return the request for the engine, with a ``strategy`` that was chosen for ``auto``."""
        words, config, shared = self.words, self.config, self.engine.shares_files
        folder = Path.cwd() if shared else PurePosixPath(self.options["storage_path"])
        place = _config_place(self, shared=shared)
        given = list(words.overrides)
        if words.plan_file is not None:
            given += ["--plan", str(words.plan_file.absolute()) if shared else f"{place.parent}/plan.toml"]
        elif config.parallel.strategy == "auto" and strategy is not None:
            given.append(f"parallel.strategy={strategy}")
        carried = {"config.toml": words.config_file} | ({"plan.toml": words.plan_file} if words.plan_file else {})
        options = dict(self.options)
        if words.via == "skypilot":
            options["carried"] = {name: str(path.absolute()) for name, path in carried.items()}
        if words.via == "torchrun":
            options["hosts"] = options["hosts"].split(",") if options["hosts"] else None
        return LaunchRequest(
            name=self.name,
            config_file=str(place),
            train_words=tuple(given),
            output=str(folder / config.train.output),
            folder=str(folder),
            python=words.python or (sys.executable if shared else "python"),
            nodes=words.nodes,
            nproc=self.nproc,
            min_nodes=config.launch.min_nodes or words.nodes,
            max_nodes=config.launch.max_nodes or words.nodes,
            device=self.cluster.device,
            gpu=self.cluster.gpu,
            cores=words.cores or _cores(config, self.cluster),
            restarts=USUAL_RESTARTS if words.restarts is None else words.restarts,
            agent_restarts=_agent_restarts(words, config),
            grace_s=words.grace_s,
            interface=words.interface,
            env={name: value for name, _, value in (item.partition("=") for item in words.env)},
            documents={name: path.read_text() for name, path in carried.items()} if not shared else {},
            options=options,
        )


def checked(words: LaunchWords, of_engines: Mapping[str, Any]) -> Launch:
    """Read and check all that was given.

    Raises:
        UserError: every problem, at once.
    """
    if words.via not in ENGINES:
        what = f"--via '{words.via}' must be" if words.via else "--via is missing: name the engine,"
        raise UserError(f"{what} {either([*ENGINES])}{did_you_mean(words.via, ENGINES)}")
    engine = ENGINES[words.via]
    options, problems = engine_options(of_engines, words.via)
    plan = tried(problems, partial(given_plan, words.plan_file, words.overrides)) if words.plan_file else None
    strategy = None if plan is None else plan.strategy
    config = tried(problems, partial(read_config, words.config_file, words.overrides, planned=strategy))
    if config is None:
        raise UserError(*problems)
    cluster = tried(problems, partial(_cluster, words, config, plan))
    if words.interface is not None and (not words.interface.isprintable() or " " in words.interface):
        problems.append(f"--interface '{words.interface}' is not the name of an interface; ip link lists them")
    problems += [
        f"--env '{item}' must be NAME=VALUE" for item in words.env if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", item)
    ]
    names = [item.partition("=")[0] for item in words.env]
    problems += [f"--env {name} is given {n} times; give it once" for name, n in Counter(names).items() if n > 1]
    if cluster is not None:
        problems += (wrong := _world_problems(words, config, plan, cluster))
        if plan is None and not wrong:
            from shardwise.run.job import draft_plan  # it imports torch

            tried(problems, partial(draft_plan, config, cluster))  # the split of the batch
    problems += _node_problems(words, config)
    problems += [] if engine.shares_files else _storage_problems(words, config, options)
    if words.restarts is not None and options.get("kind") in ("trainjob", "cluster"):
        problems.append(f"--restarts {words.restarts} does nothing with --kind {options['kind']}; remove it")
    needs_client = engine.submit is not None or options.get("hosts")
    if needs_client and not words.dry_run and shutil.which(engine.client) is None:
        problems.append(f"{engine.client} is not installed here, and it starts the run; install it, or add --dry-run")
    if cluster is None:
        raise UserError(*problems)
    launch = Launch(words, config, engine, options, plan, cluster, tuple(_notes(words, config, engine, options)))
    problems += engine.problems(launch.request())
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return launch


def _cluster(words: LaunchWords, config: Config, plan: Plan | None) -> ClusterSpec:
    """Return the machines that are asked for.

    Raises:
        UserError: they are not known enough.
    """
    nproc = words.nproc or config.parallel.nproc
    if nproc is None and plan is not None:
        nproc, rest = divmod(plan.dims.world_size, words.nodes)
        if rest:
            fitting = [n for n in range(1, plan.dims.world_size + 1) if plan.dims.world_size % n == 0]
            raise PlanError(
                f"--plan '{words.plan_file}' is for {plan.dims.world_size} ranks, which --nodes {words.nodes} cannot "
                f"share evenly; use --nodes {either([str(n) for n in fitting])}"
            )
    here = None
    if words.gpu is None:
        here = detect(config.parallel.device if config.parallel.device == "cpu" else "auto")
    if words.gpu is not None and config.parallel.device == "cpu":
        raise PlanError(f"--gpu {words.gpu}, and parallel.device is cpu; leave one of them out")
    if words.gpu is not None:
        return _of_gpu(words, nproc)
    if here is not None and (config.parallel.device == "cpu" or here.device == "cuda"):
        update = {"nodes": words.nodes, "devices_per_node": nproc or here.devices_per_node}
        if here.device == "cpu" and here.host_memory_bytes is not None:
            update["device_memory_bytes"] = here.host_memory_bytes // update["devices_per_node"]
        return here.model_copy(update=update)
    if config.parallel.device == "auto":
        raise PlanError(
            "the device of the machines is not known, as this one has no GPU; give --gpu NAME (shardwise plan --list "
            "gpus), or parallel.device=cuda if its type is unknown, or parallel.device=cpu"
        )
    if nproc is None:
        raise PlanError("--nproc is missing: the number of GPUs of a machine is not known; give it, or --gpu")
    return ClusterSpec(device="cuda", device_name=UNKNOWN_GPU, nodes=words.nodes, devices_per_node=nproc)


def _of_gpu(words: LaunchWords, nproc: int | None) -> ClusterSpec:
    """Return machines with the GPUs that ``--gpu`` names."""
    if nproc is None:
        gpu = parse_cluster(f"1x1x{words.gpu}").gpu
        nproc = None if gpu is None else gpu.devices_per_node
    if nproc is None:
        raise PlanError(f"--nproc is missing: how many {words.gpu} a machine has is not known")
    return parse_cluster(f"{words.nodes}x{nproc}x{words.gpu}")


def _world_problems(words: LaunchWords, config: Config, plan: Plan | None, cluster: ClusterSpec) -> list[str]:
    """List why the strategy does not fit on these ranks, with numbers that do."""
    nodes, nproc, world = words.nodes, cluster.devices_per_node, cluster.world_size
    shown = f"--nodes {nodes} × --nproc {nproc} = {world} ranks"
    problems = []
    if plan is not None and plan.dims.world_size != world:
        problems.append(
            f"--plan '{words.plan_file}' is for {plan.dims.world_size} ranks, and {shown}; make the product "
            f"{plan.dims.world_size}, or make a new plan"
        )
    if config.parallel.strategy == "auto":
        return problems
    strategy = parse_strategy(config.parallel.strategy)
    key = f"parallel.strategy = {strategy}"
    inside = strategy.tp * strategy.cp
    if nproc % strategy.tp:
        fitting = [n for n in range(1, nproc + 1) if nproc % n == 0]
        problems.append(
            f"{key}: tp {strategy.tp} must divide the {nproc} ranks of a node, as its groups stay inside one; use tp "
            f"{either([str(n) for n in fitting])}, or an --nproc that is a multiple of {strategy.tp}"
        )
        return problems
    ranks = inside * strategy.pp
    if world % ranks:
        fitting = [n for n in range(1, 2 * ranks + 1) if n * nproc % ranks == 0][:3]
        problems.append(
            f"{key} needs a multiple of {ranks} ranks, and {shown}; use --nodes {either([str(n) for n in fitting])} "
            f"with this --nproc, or degrees whose product divides {world}"
        )
    low, high = config.launch.min_nodes or nodes, config.launch.max_nodes or nodes
    unfit = [n for n in range(low, high + 1) if n * nproc % ranks]
    if unfit and not world % ranks:
        problems.append(
            f"{key} needs a multiple of {ranks} ranks, which {unfit[0]} nodes × {nproc} are not, and launch.min_nodes "
            f"and max_nodes allow {low} to {high} nodes; narrow them, or use smaller degrees"
        )
    return problems


def _node_problems(words: LaunchWords, config: Config) -> list[str]:
    """List numbers of nodes that contradict each other."""
    low, high = config.launch.min_nodes, config.launch.max_nodes
    problems = []
    if low is not None and low > words.nodes:
        problems.append(f"launch.min_nodes = {low}, and --nodes is {words.nodes}; use --nodes {low}, or a smaller one")
    if high is not None and high < words.nodes:
        problems.append(f"launch.max_nodes = {high}, and --nodes is {words.nodes}; use --nodes {high}, or a larger one")
    elif high is not None and high > words.nodes and words.via != "torchrun":
        problems.append(
            f"launch.max_nodes = {high}, and {words.via} gives the run --nodes {words.nodes}; use --nodes {high} (the "
            "run continues with launch.min_nodes), or remove it"
        )
    return problems


def _storage_problems(words: LaunchWords, config: Config, options: Mapping[str, Any]) -> list[str]:
    """List paths that are not on the storage that an engine mounts."""
    storage, output = PurePosixPath(options["storage_path"]), PurePosixPath(config.train.output)
    if not storage.is_absolute():
        return [f"--storage-path '{storage}' must be absolute, such as /storage"]
    if output.is_absolute() and not output.is_relative_to(storage):
        return [
            f"train.output = {output} is on a machine's own disk, which is lost with it and which others do not see; "
            f"put it below --storage-path {storage}, or make it relative"
        ]
    return []


def _notes(words: LaunchWords, config: Config, engine: LaunchEngine, options: Mapping[str, Any]) -> list[str]:
    """Return what to know about folders and network."""
    notes = []
    if words.nodes > 1 and engine.shares_files:
        output = Path(config.train.output).absolute()
        if not Path(config.train.output).is_absolute():
            notes.append(f"train.output = {config.train.output} is relative: all nodes use {output}")
        mount = _mount(output)
        if mount is not None:
            notes.append(
                f"train.output = {output} is on {mount.fstype} of this machine (mounted at {mount.mountpoint}): "
                "it must be on a file system that all nodes share, as each rank reads what rank 0 prepares there"
            )
    if words.nodes > 1 and options.get("bucket"):
        notes.append(
            f"--bucket {options['bucket']}: not every object store can append to a file, as a run does; --volume is a "
            "file system that all machines share"
        )
    if words.nodes > 1 and words.interface is None:
        notes.append("network: NCCL and gloo each choose an interface; --interface NAME sets it")
    elif words.interface is not None:
        notes.append(f"network: NCCL and gloo use {words.interface}")
    return notes


def _mount(path: Path) -> Any:
    """Return the mount of a path if it is of this machine alone, as far as its type tells."""
    mounts = {Path(one.mountpoint): one for one in psutil.disk_partitions(all=True)}
    found = next((mounts[parent] for parent in (path, *path.parents) if parent in mounts), None)
    if found is None or found.fstype in _SHARED or found.fstype.startswith(_SHARED_PREFIX):
        return None
    return found


def _agent_restarts(words: LaunchWords, config: Config) -> int:
    """Return how often torchrun starts the ranks anew: of an elastic run; else the engine starts all nodes anew."""
    if words.via == "torchrun" or (config.launch.min_nodes or words.nodes) != words.nodes:
        elastic = config.launch.min_nodes or config.launch.max_nodes
        return words.restarts if words.restarts is not None else USUAL_RESTARTS if elastic else 0
    return 0


def _cores(config: Config, cluster: ClusterSpec) -> int:
    """Return the cores of a node: as configured, else the usual ones of a GPU, else one for each rank."""
    usual = CORES_OF_GPU if cluster.device == "cuda" else 1
    return cluster.devices_per_node * (config.parallel.threads or usual)


def _config_place(launch: Launch, *, shared: bool) -> Path | PurePosixPath:
    """Return where the ranks read the config."""
    if shared:
        return launch.words.config_file.absolute()
    folder = CONFIG_FOLDER if launch.words.via == "kubernetes" else config_folder(launch.name)
    return PurePosixPath(folder) / "config.toml"
