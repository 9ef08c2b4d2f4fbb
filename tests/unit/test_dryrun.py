"""The dry run: the real step on fake tensors, and its extension over the depth."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from shardwise.cost.memory.estimate_memory import estimate_memory
from shardwise.dryrun.dry_run import DryRun, ModelSource, dry_run, prove
from shardwise.dryrun.extrapolate import Traced, depth_of, extended, live_by_phase, shorten
from shardwise.dryrun.record import StorageEvent, peaks_of
from shardwise.errors import ModelError, PlanError
from shardwise.model.read import read_model
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.workload import Workload
from tests.models import LENGTH, Decoder

MIB = 1024**2


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """What a fork finds loaded it need not load; not at the file's import, which is each worker's, for seconds."""
    for name in ("torch._decomp", "torch._dynamo", "torch.distributed.optim", "shardwise.run.rank_main"):
        importlib.import_module(name)


def plan_of(strategy: str, world: int, **options: object) -> Plan:
    dims = dims_for(parse_strategy(strategy), world)
    return Plan(strategy=strategy, dims=dims, **{"micro_batch": 2, "seq_len": LENGTH, **options})


two_blocks = functools.partial(Decoder, num_blocks=2)  # without a name: carried over by a fork, which is quick

three_blocks = functools.partial(Decoder, num_blocks=3)


@functools.cache
def rehearsed(strategy: str, world: int) -> DryRun:
    """Of two blocks; several tests look at one rehearsal."""
    return dry_run(two_blocks, plan_of(strategy, world))


def looks_at_values() -> nn.Module:
    class Looks(Decoder):
        def forward(self, ids):
            return super().forward(ids) * float(ids.sum())

    return Looks()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "hsdp", "zero1"])
def test_state_is_what_the_closed_formulas_say(strategy):
    plan, found = plan_of(strategy, 8), rehearsed(strategy, 8)
    said = estimate_memory(read_model(two_blocks()), plan, Workload())
    # what FSDP2 holds is padded to equal chunks; here it divides nothing evenly
    padded = plan.parsed.shards_parameters
    assert not found.extrapolated
    for name in ("parameters", "gradients", "optimizer"):
        has, want = found.categories[name], getattr(said, name)
        assert want is not None and (want <= has <= 2 * want if padded else has == want), name
    assert found.allocated == max(p.allocated for p in found.phases) <= (found.reserved or 0)
    assert [p.name for p in found.phases if p.step == 2] == ["forward", "backward", "optimizer"]


def test_the_collectives_are_the_programs():
    found = {item.name: item for item in rehearsed("fsdp", 8).collectives}
    # root and two blocks; the root and the last block stay gathered until backward
    assert found["all_gather"].calls == 3 + 1
    assert found["reduce_scatter"].calls == 3
    full = sum(p.numel() for p in two_blocks().parameters()) * 4
    assert full <= found["reduce_scatter"].num_bytes < 2 * full  # padded to chunks of 8


def test_what_dtensor_thinks_of_whole_shapes_is_not_counted():
    found = rehearsed("fsdp", 8)
    (first,) = [p for p in found.phases if (p.step, p.name) == (1, "optimizer")]
    held = ("parameters", "gradients", "optimizer", "activations", "buffers")
    assert first.allocated - sum(first.parts[name] for name in held) < 16 * sum(1 for _ in two_blocks().parameters())


def test_adams_state_comes_in_the_first_step_and_stays():
    found = dry_run(two_blocks, plan_of("ddp", 1))
    by_step = {p.step: p for p in found.phases if p.name == "forward"}
    state = found.categories["optimizer"]
    scalars = len(list(two_blocks().parameters())) * 4
    assert state == 2 * sum(p.numel() for p in two_blocks().parameters()) * 4 + scalars
    assert by_step[2].allocated - by_step[1].allocated == state
    sgd = dry_run(two_blocks, plan_of("ddp", 1), optimizer={"name": "sgd", "momentum": 0.0})
    assert sgd.categories["optimizer"] == 0


def test_recompute_saves_activations_and_narrow_weights_are_buffers():
    plain = dry_run(three_blocks, plan_of("ddp", 2, precision="bf16", device="cuda"))
    spare = dry_run(three_blocks, plan_of("ddp", 2, precision="bf16", recompute="full", device="cuda"))
    here = dry_run(three_blocks, plan_of("ddp", 2, precision="bf16", recompute="full"))
    states = 3 * torch.get_rng_state().nbytes  # one for each block; host memory where there is a device
    more = here.categories["activations"] - spare.categories["activations"]
    assert states <= more <= 2 * states  # recompute sets the present one aside, too
    assert spare.categories["activations"] < 0.6 * plain.categories["activations"]
    assert plain.categories["buffers"] > 0
    assert dry_run(three_blocks, plan_of("ddp", 2)).categories["buffers"] == 0


@pytest.mark.turns(3)
def test_the_depth_is_extended_to_the_byte():
    source = functools.partial(Decoder, num_blocks=8)
    plan = plan_of("fsdp", 4, precision="bf16", grad_accum=2)
    short, full = dry_run(source, plan, extrapolate=True), dry_run(source, plan)
    assert short.extrapolated and not full.extrapolated
    assert (short.blocks or 99) < 8
    assert short.reserved is None and full.reserved is not None
    named = [(p.step, p.name, p.allocated) for p in short.phases]
    assert named == [(p.step, p.name, p.allocated) for p in full.phases]
    assert short.categories == full.categories
    assert short.collectives == full.collectives


def test_ranks_that_hold_something_else_are_proved_apart():
    first, last = prove(two_blocks, plan_of("fsdp", 8))
    assert (first.rank, last.rank) == (0, 7)
    assert last.categories["parameters"] <= first.categories["parameters"]
    assert len(prove(two_blocks, plan_of("ddp", 8))) == 1
    even = functools.partial(nn.Sequential, nn.Embedding(16, 8), nn.Linear(8, 16))
    assert len(prove(even, plan_of("fsdp", 8))) == 1


def test_a_closure_and_own_batches_are_carried_over():
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

    found = dry_run(
        build,
        plan_of("ddp", 1, seq_len=None, micro_batch=5),
        batch=lambda size: (torch.zeros(size, 6), torch.zeros(size, 3)),
        loss=lambda outputs, labels: ((outputs - labels) ** 2).sum(),
    )
    assert found.categories["parameters"] == (6 * 32 + 32 + 32 * 3 + 3) * 4


def test_what_cannot_be_rehearsed_is_said():
    with pytest.raises(PlanError, match=r"zero1 with \+tp2 can be planned but is not run"):
        dry_run(two_blocks, plan_of("zero1+tp2", 4))
    with pytest.raises(PlanError, match=r"fsdp\+pp2 cannot be rehearsed.*without \+pp"):
        dry_run(two_blocks, plan_of("fsdp+pp2", 4))
    with pytest.raises(PlanError, match="needs the plan's seq_len"):
        dry_run(two_blocks, plan_of("ddp", 1, seq_len=None))
    with pytest.raises(ModelError, match=r"does not run on fake tensors.*\.item\(\)"):
        dry_run(lambda: looks_at_values(), plan_of("ddp", 1))
    with pytest.raises(ModelError, match="model_type 'llamma' cannot be built"):
        ModelSource(config={"model_type": "llamma"}).builder()


@pytest.mark.turns(3)
def test_tensor_parallel_is_rehearsed_as_one_rank_of_its_group():
    """A half of every cut weight, and the collectives of the tensor-parallel axis beside those of the data's."""
    keys = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    source = ModelSource(config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **keys})
    full = dry_run(source.builder(), plan_of("ddp", 2, seq_len=8))  # by a fork, which is quick
    half = dry_run(source, plan_of("ddp+tp2", 2, seq_len=8))
    norms = (2 * 2 + 1) * 32 * 4
    assert 2 * half.categories["parameters"] - norms == full.categories["parameters"]
    assert {"all_gather", "reduce_scatter"} <= {total.name for total in half.collectives}


def test_a_hugging_face_config_is_a_source():
    keys = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = {"model_type": "llama", "vocab_size": 64, **keys}
    found = dry_run(ModelSource(config=config).builder(), plan_of("fsdp", 4))
    assert found.blocks == 2
    assert DryRun.model_validate_json(found.model_dump_json()) == found
    assert [p.name for p in found.estimate_phases()] == ["load", "forward", "backward", "optimizer", "first_step"]


@pytest.mark.turns(3)
def test_the_caller_gets_no_process_group():
    code = (
        "import sys; from shardwise.dryrun.dry_run import ModelSource, dry_run; from shardwise.plan.plan import Plan;"
        "found = dry_run(ModelSource(factory='tests.models:Decoder'), Plan(micro_batch=1, seq_len=7));"
        "assert found.allocated; print([name for name in sys.modules if name in ('torch', 'torch.distributed')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert json.loads(done.stdout.splitlines()[-1].replace("'", '"')) == [], done.stderr


def test_peaks_follow_events():
    events = [
        StorageEvent(0, 3 * MIB, "default", 1, "forward"),
        StorageEvent(1, 2 * MIB, "all_gather", 1, "forward"),
        StorageEvent(1, -2 * MIB, "all_gather", 1, "forward"),
        StorageEvent(-1, 0, "default", 1, "backward"),
        StorageEvent(0, -3 * MIB, "default", 1, "backward"),
    ]
    peaks, most = peaks_of(events, {0: "activations"})
    assert [(p.phase, p.allocated, p.reserved) for p in peaks] == [
        ("forward", 5 * MIB, 40 * MIB),
        ("backward", 3 * MIB, 40 * MIB),
    ]
    assert peaks[0].parts["buffers"] == 2 * MIB  # another stream's, and nobody said what
    assert most["activations"] == 3 * MIB


def _trace(blocks: int, forward: int, backward: int, head: int = 100) -> Traced:
    """Each block saves ``forward`` bytes, and leaves ``backward`` bytes of gradients when it frees them."""
    events = [StorageEvent(i, forward, "default", 1, "forward") for i in range(blocks)]
    events += [StorageEvent(-2, head, "default", 1, "backward"), StorageEvent(-2, -head, "default", 1, "backward")]
    for i in reversed(range(blocks)):
        events.append(StorageEvent(100 + i, backward, "default", 1, "backward"))
        events.append(StorageEvent(i, -forward, "default", 1, "backward"))
    return Traced(blocks, live_by_phase(events), {})


@pytest.mark.parametrize(("forward", "backward", "peak"), [(10, 3, 10 * 50 + 100), (3, 10, 10 * 50 + 3)])
def test_a_peak_that_moves_with_the_depth_is_followed(forward, backward, peak):
    found = extended([_trace(n, forward, backward) for n in (3, 4, 5)], 50)
    assert found is not None
    assert max(_trace(50, forward, backward).live["1", "backward", "1"]) == peak
    assert found["1", "backward"] == peak
    assert found["1", "forward"] == 50 * forward


def test_uneven_growth_is_not_extended():
    traces = [_trace(n, 10, 3) for n in (2, 3, 4)]
    assert extended(traces[:2], 50) is None
    odd = _trace(4, 11, 3)
    assert extended([*traces[:2], odd], 50) is None
    assert extended([*traces[:2], _trace(5, 10, 3)], 50) is None


def test_only_equal_blocks_are_dropped():
    model = Decoder(num_blocks=5)
    assert depth_of(model) == 5
    shorten(model, 2)
    assert len(model.blocks) == 2
    assert depth_of(Decoder(frozen=True)) is None
    assert depth_of(nn.Linear(2, 2)) is None
