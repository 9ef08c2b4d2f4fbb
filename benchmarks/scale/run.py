"""What one rank computes in a world of 8 to 16,384 ranks: seconds and bytes of each phase, under a fake process group.

    python benchmarks/scale/run.py --write

Each world is a fresh process that is rank 0 of it. See README.md for what is real and what is not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WORLDS = (8, 128, 1024, 16384)
STEPS = 7
MODEL = "llama-3.1-70b"
HASH = "xxh3-128:" + "0" * 32
JOB = "x" * 20_000  # the bytes of a usual job


class Clock:
    """Samples of each phase, in seconds, and sizes in bytes."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.sizes: dict[str, int] = {}

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Time what is inside."""
        began = time.perf_counter()
        yield
        self.seconds.setdefault(phase, []).append(time.perf_counter() - began)

    def around(self, owner: Any, name: str, phase: str) -> None:
        """Time each call of a function of the product."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.of(phase):
                return inner(*args, **kwargs)

        setattr(owner, name, timed)


def main() -> None:
    """Measure each world in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the samples beside this file")
    arguments = parser.parse_args()
    if arguments.ranks:
        print(json.dumps(measure(arguments.ranks, arguments.repeats)))
        return
    import torch

    began, worlds = time.perf_counter(), {}
    for ranks in WORLDS:
        command = [sys.executable, __file__, "--ranks", str(ranks), "--repeats", str(arguments.repeats)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        worlds[str(ranks)] = json.loads(done.stdout.splitlines()[-1])
    date = datetime.date.today().isoformat()
    document = {
        "date": date,
        "device": "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "seconds_in_all": time.perf_counter() - began,
        "worlds": worlds,
    }
    print("\n".join(table(worlds)))
    if arguments.write:
        (Path(__file__).parent / f"scale_cpu_{date}.json").write_text(json.dumps(document, indent=1) + "\n")


def table(worlds: dict[str, Any]) -> list[str]:
    """Lay out medians, a phase a row."""
    lines = [f"| phase | {' | '.join(f'{int(ranks):,}' for ranks in worlds)} |", "|---" * (len(worlds) + 1) + "|"]
    found = [one["seconds"] for one in worlds.values()]
    for phase in dict.fromkeys(phase for one in found for phase in one):
        cells = [_seconds(statistics.median(one[phase])) if phase in one else "–" for one in found]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    sizes = [one["bytes"] for one in worlds.values()]
    for phase in dict.fromkeys(phase for one in sizes for phase in one):
        cells = [_bytes(one[phase]) if phase in one else "–" for one in sizes]
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    return lines


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _bytes(value: int) -> str:
    return f"{value / 1e6:,.1f} MB" if value >= 1e5 else f"{value / 1e3:.1f} kB"


def measure(world: int, repeats: int) -> dict[str, Any]:
    """Run each phase as rank 0 of ``world`` ranks."""
    import torch

    from shardwise.dryrun.record import fake_world

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    clock = Clock()
    for _ in range(repeats):
        meet(world, clock)
        plan_search(world, clock)
    with fake_world(world, 0):
        for _ in range(repeats):
            send_job(world, clock)
        train(world, clock)
        for _ in range(repeats):
            checkpoint(world, clock)
    return {"seconds": clock.seconds, "bytes": clock.sizes}


def ranks_of(world: int) -> Any:
    """Rank 0 of eight on this node; the fake group also carries control messages."""
    import torch
    import torch.distributed as dist

    from shardwise.distributed.process_group import Ranks

    cpu, control = torch.device("cpu"), dist.group.WORLD
    return Ranks(0, world, 0, 8, cpu, control, owns_group=False, owns_control=False)


def meet(world: int, clock: Clock) -> None:
    """Rank 0 reads how all others present themselves, with the facts of a config, from a store in its memory."""
    from torch._C._distributed_c10d import HashStore, PrefixStore

    from shardwise.distributed import rendezvous
    from shardwise.distributed.same_environment import facts_of
    from shardwise.environment import Rendezvous
    from shardwise.train.config import read_config

    place = Rendezvous(0, world, 0, 8, "node-0", 29500)
    config = read_config(Path(__file__).parents[2] / "examples" / "stdlib.toml").model_dump(mode="json")
    facts = facts_of(place, "2.13.0", "cpu", {"": config})
    mine = rendezvous.hello(place, "node-0", facts, [])
    store = HashStore()
    board = PrefixStore("shardwise/world/1/meeting", store)
    for rank in range(1, world):
        one = dataclasses.replace(mine, rank=rank, node=f"node-{rank // 8}", nonce=f"{rank:016x}")
        text = json.dumps(dataclasses.asdict(one))
        board.set(f"hello/{rank}", text)
        clock.sizes["start: what rank 0 reads"] = len(text) * world
    with clock.of("start: ranks compare their environments"):
        rendezvous._lead(store, place, mine, 60.0)


def send_job(world: int, clock: Clock) -> None:
    """Rank 0 sends the job to all."""
    from shardwise.distributed.process_group import broadcast_text

    with clock.of("start: rank 0 sends the job"):
        assert broadcast_text(JOB, ranks_of(world)) == JOB


def plan_search(world: int, clock: Clock) -> None:
    """Search all plans of the model over the world's nodes of eight GPUs."""
    from shardwise.hardware.parse_cluster import parse_cluster
    from shardwise.model.load_model import load_profile
    from shardwise.plan.workload import Workload
    from shardwise.search.search import search

    cluster = parse_cluster(f"{world // 8}x8xH100" if world > 8 else "8xH100")
    with clock.of("plan search (70B)"):
        search(load_profile(MODEL, seq_len=4096), Workload(seq_len=4096, global_batch=4 * world), cluster)


def train(world: int, clock: Clock) -> None:
    """Prepare and train a small model with all that `shardwise.start` observes it with."""
    import torch
    from torch import nn

    from shardwise.plan.dims import dims_for
    from shardwise.plan.plan import Plan
    from shardwise.plan.strategy import parse_strategy
    from shardwise.receipts.effects import EffectsRecorder
    from shardwise.run.start import _observe
    from shardwise.train import step as steps
    from shardwise.train.agreement import Agreement
    from shardwise.train.session import Session

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.two(self.one(x).relu())

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(16, 4))
    plan = Plan(strategy="fsdp", dims=dims_for(parse_strategy("fsdp"), world), device="cpu", micro_batch=2)
    session = Session(ranks=ranks_of(world), planner=lambda *_: plan)
    steps.check_finite = lambda *_, **__: None  # a fake group's sums are not sums
    attribution = _observe(session, receipts=True, output=None)
    effects = next(one for one in session.observers if isinstance(one, EffectsRecorder))
    effects._strict, effects._on_receipt = False, None
    attribution.on_step_times = lambda *_: None
    starts = StepStarts(clock)
    session.phase_watchers.append(starts.on_phase)
    clock.around(Agreement, "send", "step: send the message at its end")
    clock.around(Agreement, "settle", "step: read the message at its end")
    clock.around(effects, "on_step_end", "receipt: effects, once")
    with clock.of("prepare (17 layers, fsdp)"):
        outer, optimizer = session.prepare(model, torch.optim.AdamW(model.parameters()), torch.zeros(2, 16))
    session.observers.append(starts)
    batches = [(torch.randn(2, 16), torch.randn(2, 4)) for _ in range(STEPS)]
    for step in session.run_windows([[batch] for batch in batches]):
        for inputs, labels in step:
            step.backward(nn.functional.mse_loss(outer(inputs), labels, reduction="sum"))
        step.update(optimizer, clip_norm=1.0)
    attribution.finish()
    with clock.of("end: step times of all ranks"):
        attribution.timing()
    clock.seconds["receipt: effects, once"] = [max(clock.seconds["receipt: effects, once"])]
    clock.sizes["step: bytes that a message brings to a rank"] = 96 * 8 * world


class StepStarts:
    """Observer that times a step's first message: from the data to the first forward."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.began = clock, 0.0

    def on_phase(self, phase: str) -> None:
        """Start with the message."""
        if phase == "transfer":
            self.began = time.perf_counter()

    def on_step_start(self, session: Any, step: Any) -> None:
        """End with the last observer of the step's start."""
        self.clock.seconds.setdefault("step: the message at its start", []).append(time.perf_counter() - self.began)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Ignore the other events."""
        return lambda *_: None


def checkpoint(world: int, clock: Clock) -> None:
    """Plan a save of the 70B model under fsdp, merge what all ranks report, and plan a resume; no weights."""
    import torch

    from shardwise.checkpoint import load, messages, save_report, spread_report
    from shardwise.checkpoint.format import MANIFEST, read_manifest
    from shardwise.checkpoint.layout import slots_of
    from shardwise.checkpoint.save_plan import deal, holdings_of
    from shardwise.plan.dims import dims_for
    from shardwise.plan.plan import Plan
    from shardwise.plan.strategy import parse_strategy

    model, optimizer = large_model(world)
    spread = spread_report.is_spread(world)
    with clock.of("save: plan"):
        local = holdings_of(model, optimizer, {"cpu": torch.zeros(5056, dtype=torch.uint8)})
        loads = messages.gather_counts(local.own_bytes)
        marks = messages.gather_counts(local.mark)
        share = deal(local, loads, marks, spread=spread)
    plan = Plan(strategy="fsdp", dims=dims_for(parse_strategy("fsdp"), world), device="cpu", micro_batch=2)
    head = save_report.ManifestHead.of(100, plan, {}, optimizer, None)
    save_report.write_file = lambda path, tensors: (path.touch(), dict.fromkeys(tensors, HASH))[1]
    with tempfile.TemporaryDirectory() as folder:
        working = Path(folder)
        with clock.of("save: a rank's report"):
            report = save_report.write_share(working, share, 0, spread=spread)
        for rank in range(1, world):
            (working / f"rank-{rank:05d}.safetensors").touch()
        if spread:
            clock.sizes["save: table of hashes of a rank"] = (working / "rank-00000.hashes.json").stat().st_size
            # a fake group does not exchange parts of different lengths: as many bytes come back as were sent
            messages.deal_json = lambda values, group: [json.loads(json.dumps(value)) for value in values]
            with clock.of("save: a rank deals its report to all"):
                spread_report.spread_report(report, world, None)
            texts = merged_by_owners(world, report, clock)
        else:
            texts = [json.dumps(report_of(rank, world, report)) for rank in range(world)]
        clock.sizes["save: what rank 0 gathers"] = sum(map(len, texts))
        with clock.of("save: rank 0 reads reports"):
            reports = [json.loads(text) for text in texts]
        del texts
        with clock.of("save: rank 0 merges the manifest"):
            manifest = save_report.merged(working, reports, head)
        del reports
        with clock.of("save: rank 0 writes the manifest"):
            document = manifest.to_json().encode()
        clock.sizes["manifest (70B)"] = len(document)
        (working / MANIFEST).write_bytes(document)
        with clock.of("resume: read the manifest"):
            manifest = read_manifest(working)
        with clock.of("resume: find this rank's shards"):
            work = load._Work(manifest)
            load._match_model(slots_of(model), None, work)
        with clock.of("resume: agree on what is hashed"):
            load._unseen(work)


def report_of(rank: int, world: int, first: dict[str, Any]) -> dict[str, Any]:
    """What another rank reports: the same names and its own rows."""
    entries: dict[str, Any] = {}
    for number, (name, entry) in enumerate(first["entries"].items()):
        if name.startswith("rng/"):
            entries[f"rng/{rank}/cpu"] = entry
        else:
            found = entry_of(rank, world, number, entry)
            entries |= {name: found} if found else {}
    file, own = f"rank-{rank:05d}.safetensors", {} if rank == 0 else {"groups": None, "aliases": {}}
    return first | {"rank": rank, "file": file, "entries": entries} | own


def entry_of(rank: int, world: int, number: int, entry: list[Any]) -> list[Any] | None:
    """What another rank writes of a tensor: rows as `torch.chunk` cuts them; scalars by turns, or all on rank 0."""
    dtype, shape, box, made = entry
    if not shape:
        return [dtype, shape, [[], []], HASH] if rank == (0 if world >= 32 else number % world) else None
    each = -(-shape[0] // world)
    begin, end = min(shape[0], each * rank), min(shape[0], each * (rank + 1))
    mine = [[begin, *box[0][1:]], [end - begin, *box[1][1:]]] if end > begin else None
    return [dtype, shape, mine, made if mine else None]


def merged_by_owners(world: int, report: dict[str, Any], clock: Clock) -> list[str]:
    """Merge the rows of all ranks where they belong, and return what each rank then sends to rank 0.

    Ranks are simulated one after the other. Tensors of one shape are merged alike, so each shape is merged once.
    """
    from shardwise.checkpoint.spread_report import merge_rows

    owned: list[dict[str, Any]] = [{} for _ in range(world)]
    alike: dict[str, Any] = {}
    for number, (name, entry) in enumerate(report["entries"].items()):
        if name.startswith("rng/"):
            for rank in range(world):
                key, shard = f"rng/{rank}/cpu", [rank, *entry[2], HASH]
                row = {"dtype": entry[0], "shape": entry[1], "shards": [shard]}
                owned[zlib.crc32(key.encode()) % world][key] = row
            continue
        kind = str(entry[1])
        if kind not in alike:
            rows = [{name: found} if (found := entry_of(rank, world, number, entry)) else {} for rank in range(world)]
            texts = [json.dumps({"entries": row}) for row in rows]
            clock.sizes.setdefault("save: rows of a tensor, at its owner", sum(map(len, texts)))
            with clock.of("save: its owner merges a tensor"):
                merged = merge_rows([json.loads(text)["entries"] for text in texts])
            alike[kind] = merged["merged"][name]
        owned[zlib.crc32(name.encode()) % world][name] = alike[kind]
    texts = []
    for rank, part in enumerate(owned):
        sent = report | {"entries": {}, "scalars": {}, "odd": "", "order": [], "merged": part}
        if rank:
            sent |= {"rank": rank, "file": f"rank-{rank:05d}.safetensors", "table": HASH, "groups": None, "aliases": {}}
        texts.append(json.dumps(sent))
    return texts


def large_model(world: int) -> tuple[Any, Any]:
    """The catalogue's tensors as fsdp lays them out, with AdamW's state: shapes, and a byte of memory."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from shardwise.model.load_model import load_profile

    mesh = init_device_mesh("cpu", (world,))

    def row_share(shape: tuple[int, ...]) -> Any:
        each = min(shape[0], -(-shape[0] // world))
        local = torch.zeros(()).expand(each, *shape[1:])
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    root, parameters = nn.Module(), {}
    units = load_profile(MODEL, seq_len=4096).units
    shapes = {
        f"model.layers.{number}.{weight.name}" if unit.kind == "block" else f"{unit.name}.{weight.name}": weight.shape
        for unit in units
        for number in range(unit.count)
        for weight in unit.weights
    }
    for name, shape in shapes.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place._modules[part]
        parameters[name] = nn.Parameter(row_share(shape))
        place.register_parameter(last, parameters[name])
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-4)
    for one in parameters.values():
        state = {
            "step": torch.tensor(1.0),
            "exp_avg": row_share(tuple(one.shape)),
            "exp_avg_sq": row_share(tuple(one.shape)),
        }
        optimizer.state[one] = state
    return root, optimizer


if __name__ == "__main__":
    main()
