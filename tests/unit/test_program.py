"""Traits of programs: the table, a user's file, and that each trait changes what is predicted."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
from shardwise.cost.time.estimate_time import step_time
from shardwise.errors import PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.catalogue import find_architecture
from shardwise.model.profile import ModelProfile
from shardwise.model.trace import trace_module
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan, not_runnable, runnable, type_problems, unrun_types
from shardwise.plan.program import SHARDWISE, ProgramTraits, find_program, program_names, program_table
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import data_traffic, sent_bytes
from shardwise.plan.workload import Workload
from shardwise.report.candidates import print_explanation
from shardwise.report.plan_sentences import sentences
from shardwise.search.candidate import Pins
from shardwise.search.cost_inputs_of_plan import adapted
from shardwise.search.enumerate import Layout
from shardwise.search.heuristics import min_bytes, totals_of
from shardwise.search.search import search

NODE = parse_cluster("8xH100-SXM")
TRAITS = tuple(name for name in ProgramTraits.model_fields if name != "name")
# A plan on which a trait changes memory or time, and the trait's other value.
CHANGES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "modules": ("ddp+tp2", "megatron", {}),
    "expandable_segments": ("fsdp", False, {}),
    "weights": ("fsdp", "compute", {}),
    "accumulate": ("zero1", "compute", {"weights": "masters", "zero": "megatron"}),
    "reduce": ("fsdp", "compute", {}),
    "rounding": ("fsdp", "kahan", {"weights": "compute"}),
    "zero": ("zero2", "deepspeed", {}),
    "bucket_elements": ("zero2", 10**8, {"zero": "deepspeed", "weights": "masters"}),
    "flat_parameters": ("fsdp+lora", True, {}),
    "adds_in_buckets": ("ddp", True, {}),
    "loss": ("fsdp", "fused", {}),
    "logit_bytes": ("fsdp", 30.0, {}),
    "fp8_activations": ("zero1", True, {"precision": "fp8"}),
    "fp8": ("fsdp", "tensorwise", {}),
    "adapters": ("ddp+lora", "compute", {}),
    "adapter_keeps_inputs": ("ddp+qlora", True, {}),
    "lora_dropout": ("ddp+lora", True, {}),
    "attention": ("fsdp", "unfused", {}),
    "sequence_parallel": ("fsdp+tp2", False, {}),
    "async_tp": ("fsdp+tp2", True, {}),
    "pads_vocab": ("fsdp", True, {"model": "gpt2"}),
    "overlaps_zero1": ("zero1", True, {}),
    "fused_kernels": ("fsdp", True, {}),
    "expert_dispatch": ("fsdp+ep8", "ranks", {"model": "qwen3-30b-a3b"}),
    "balanced_experts": ("fsdp+ep8", True, {"model": "qwen3-30b-a3b"}),
    "overlaps_dispatch": ("fsdp+ep8", True, {"model": "qwen3-30b-a3b"}),
    "host": ("fsdp", 40.0, {}),
}
SEARCHED = ("bases", "axes", "gradient_sync")  # these decide which plans there are


def profile(name: str = "llama-3.1-8b", seq_len: int = 1024) -> ModelProfile:
    architecture = find_architecture(name)
    assert architecture is not None
    return profile_of(architecture, seq_len)


def plan_of(strategy: str, program: ProgramTraits, precision: str = "bf16", **options: Any) -> Plan:
    parsed = parse_strategy(strategy)
    low = precision != "fp32"
    types = {"weights": program.weights, "accumulate": program.accumulate, "reduce": program.reduce} if low else {}
    return Plan(
        strategy=strategy,
        dims=dims_for(parsed, 8),
        micro_batch=2,
        grad_accum=2,
        seq_len=1024,
        precision=precision,
        device="cuda",
        rounding=program.rounding,
        fp8=program.fp8,
        loss_parallel=parsed.tp > 1,
        **types,
        **(program.plan_options if parsed.tp > 1 else {}),
        **options,
    )


def costs(
    strategy: str, program: ProgramTraits, precision: str = "bf16", model: str = "llama-3.1-8b"
) -> tuple[Any, ...]:
    workload = Workload(program=program)
    plan = plan_of(strategy, program, precision)
    shape = adapted(profile(model), plan.parsed, workload, plan.precision)
    found = estimate(shape, plan, workload, NODE)
    return found.parameters, found.gradients, found.reserved, step_time(shape, plan, workload, NODE).step_s


@pytest.mark.parametrize("trait", [name for name in TRAITS if name not in SEARCHED])
def test_no_trait_is_accepted_and_ignored(trait: str) -> None:
    strategy, value, beside = CHANGES[trait]
    beside = dict(beside)
    asked = (beside.pop("precision", "bf16"), beside.pop("model", "llama-3.1-8b"))
    usual = ProgramTraits(name="test", **beside)
    other = usual.model_copy(update={trait: value})
    assert getattr(usual, trait) != value
    assert costs(strategy, usual, *asked) != costs(strategy, other, *asked), trait


def test_the_search_lays_out_what_the_program_has() -> None:
    workload = Workload(program=find_program("llm-foundry"), seq_len=1024, global_batch=64)
    found = search(profile(), workload, NODE)
    assert {c.plan.parsed.base for c in found.candidates} <= {"ddp", "zero2", "fsdp", "hsdp"}
    assert all(c.plan.parsed.tp * c.plan.parsed.pp * c.plan.parsed.cp == 1 for c in found.candidates)
    accumulating = [c.plan for c in found.candidates if c.plan.grad_accum > 1 and c.plan.parsed.shards_parameters]
    assert accumulating and {plan.gradient_sync for plan in accumulating} == {"every"}
    assert not any(c.runnable for c in found.candidates)
    with pytest.raises(PlanError, match=r"torchtune has no pipeline parallelism \(\+pp2\); it has \+tp and \+cp"):
        search(
            profile(),
            workload.model_copy(update={"program": find_program("torchtune")}),
            NODE,
            Pins(strategy=parse_strategy("fsdp+pp2")),
        )


def test_programs_without_expert_parallelism_refuse_it() -> None:
    spread = parse_strategy("fsdp+ep4")
    have = {name for name in program_names() if not find_program(name).refuses(spread)}
    assert have == {
        "shardwise",
        "torchtitan",
        "torchtitan-2024",
        "megatron",
        "megatron-bridge",
        "megatron-bridge-overlap",
        "megatron-2022",
    }
    assert "deepspeed has no expert parallelism (+ep4)" in find_program("deepspeed").refuses(spread)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_gradients_reduced_in_half_the_bytes_send_half_of_them(strategy: str) -> None:
    plan, model = plan_of(strategy, SHARDWISE), profile()
    both = [plan.model_copy(update={"reduce": kind}) for kind in ("fp32", "compute")]
    wide, narrow = (sent_bytes(model, one, SHARDWISE)["dp"] for one in both)
    halves = data_traffic(plan)
    scattered = halves.reduces * (halves.shards - 1) / halves.shards * plan.parsed.shards_parameters
    replicated = halves.reduces * 2 / halves.shards * (halves.replicas - 1) / halves.replicas
    assert wide - narrow == pytest.approx(2 * model.num_trainable * (scattered + replicated))


def test_every_trait_of_the_table_has_a_source_and_every_source_a_trait() -> None:
    for name, row in program_table().items():
        given = set(row) - {"about", "base", "sources"}
        assert row["about"] and given - {"bases"} == set(row["sources"]) - {"bases"}, name
        assert find_program(name).name == name
    assert find_program("shardwise") == SHARDWISE


@pytest.mark.parametrize("name", program_names())
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "fsdp+tp2", "zero1+pp2"])
def test_the_lower_bound_is_below_the_estimate(name: str, strategy: str) -> None:
    program = find_program(name)
    workload, plan = Workload(program=program), plan_of(strategy, program, recompute="selective")
    found = estimate(profile(), plan, workload, NODE)
    assert found.allocated is not None and found.allocated <= found.reserved
    assert peak_lower_bound(profile(), plan, workload) <= found.allocated * 1.001


@pytest.mark.parametrize("name", ["shardwise", "deepspeed", "megatron", "torchtune"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
def test_the_quick_bound_is_below_the_estimate(name: str, model: str) -> None:
    program, known = find_program(name), profile(model)
    workload = Workload(program=program)
    totals = totals_of(known, workload, NODE, "bf16")
    found = {}
    for strategy in (
        "ddp",
        "zero1",
        "zero1+tp2",
        "zero1+pp2",
        "zero1+cp2",
        "zero1+ep2",
        "fsdp+cp2",
        "fsdp+ep4",
        "zero2",
    ):
        parsed = parse_strategy(strategy)
        if program.refuses(parsed) or (parsed.ep > 1 and not known.experts):
            continue
        plan = plan_of(strategy, program)
        bytes_at_rest = estimate(known, plan, workload, NODE)
        total = bytes_at_rest.parameters + bytes_at_rest.gradients + (bytes_at_rest.optimizer or 0)
        found[strategy] = min_bytes(totals, Layout(parsed, strategy, plan.dims, 4, (1,))) / total
    assert found and max(found.values()) <= 1.0, found
    assert min(found.values()) > 0.5, found


def test_partitions_of_deepspeed_send_each_weight_once() -> None:
    plan, known = plan_of("zero2", find_program("deepspeed"), gradient_sync="every"), profile()
    own = sent_bytes(known, plan, SHARDWISE)["dp"]
    named = sent_bytes(known, plan, find_program("deepspeed"))["dp"]
    assert named == pytest.approx((2 * 2 + 2) * known.num_trainable * 7 / 8)  # two micro batches, and the stepped ones
    assert own == pytest.approx((2 * 2 + 2 * 2) * known.num_trainable * 7 / 8)  # FSDP2 gathers for each micro batch


def write(path: Any, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("base", "strategy", "model"), [("megatron-bridge", "zero1+ep8", "qwen3-30b-a3b"), ("deepspeed", "zero2", "gpt2")]
)
def test_a_file_sends_and_explains_what_its_base_does(base: str, strategy: str, model: str, tmp_path: Any) -> None:
    text = []
    for named in (base, write(tmp_path / "mine.toml", f'base = "{base}"\n')):
        workload = Workload(program=find_program(named), seq_len=1024, global_batch=64)
        best = search(
            profile(model), workload, NODE, Pins(strategy=parse_strategy(strategy), micro_batch=1)
        ).candidates[0]
        assert best.plan.program == workload.program.name
        console = Console(file=StringIO(), width=200)
        print_explanation(profile(model), NODE, best, console, workload)
        text.append([line for line in console.file.getvalue().splitlines() if line.startswith("sent in a step")])
    assert text[0] and text[0] == text[1]


def test_a_users_file(tmp_path: Any) -> None:
    file = write(tmp_path / "mine.toml", 'base = "torchtune"\nloss = "fused"\nabout = "ours"\n')
    found = find_program(file)
    assert found == find_program("torchtune").model_copy(update={"loss": "fused", "name": "mine"})
    wrong = write(tmp_path / "bad.toml", 'base = "torchtun"\nexpandable_segment = false\nweights = "bf16"\n')
    with pytest.raises(PlanError) as error:
        find_program(wrong)
    text = "\n".join(error.value.problems)
    assert len(error.value.problems) == 3
    for part in ("did you mean 'torchtune'", "did you mean 'expandable_segments'", "weights = 'bf16'"):
        assert part in text
    kinds = write(tmp_path / "kinds.toml", 'axes = "tp"\nfused_kernels = "yes"\nlogit_bytes = "6"\n')
    with pytest.raises(PlanError, match="true or false") as error:
        find_program(kinds)
    assert len(error.value.problems) == 3 and "axes = 'tp' must be a list" in str(error.value)
    with pytest.raises(PlanError, match="overlaps_dispatch = true is of experts over ranks, which axes leave out"):
        find_program(write(tmp_path / "dense.toml", 'base = "trl"\noverlaps_dispatch = true\n'))
    contradiction = write(tmp_path / "two.toml", 'accumulate = "compute"\nrounding = "kahan"\n')
    with pytest.raises(PlanError) as error:
        find_program(contradiction)
    assert len(error.value.problems) == 2, error.value.problems
    with pytest.raises(PlanError, match="give a program's name or its file"):
        find_program(str(tmp_path / "none.toml"))
    with pytest.raises(PlanError, match=r"did you mean 'megatron'"):
        find_program("megatronn")
    with pytest.raises(PlanError, match="known program's"):
        find_program(write(tmp_path / "x.toml", 'name = "megatron"\n'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = {a = 1}", "name = {'a': 1} must be a text"),
        ('name = [["a"]]', "name = [['a']] must be a text"),
        ('name = ""', "name = '' must be a text of one line, without blanks at its ends"),
        ('name = "a\\nb"', "name = 'a\\nb' must be a text of one line, without blanks at its ends"),
        ("base = [1]", "base = [1] must be one of shardwise, "),
        ("logit_bytes = inf", "logit_bytes = inf must be a finite number"),
        ("logit_bytes = 1e300", "logit_bytes = 1e+300 must be less than or equal to 1024"),
        ("host = inf", "host = inf must be a finite number"),
        ("host = nan", "host = nan must be a finite number"),
        ("host = 0", "host = 0 must be greater than 0"),
        ("bases = []", "bases = [] must have one at least of ddp, zero1, "),
        ('bases = ["ddp", ["a"]]', "bases = ['ddp', ['a']]: ['a'] must be 'ddp', 'zero1', "),
        ('axes = ["dp"]', "axes = ['dp']: 'dp' must be 'tp', 'pp', 'cp' or 'ep'"),
    ],
)
def test_each_wrong_value_of_a_file_is_a_line_with_its_rule(text: str, message: str, tmp_path: Any) -> None:
    file = write(tmp_path / "mine.toml", text + "\n")
    with pytest.raises(PlanError) as error:
        find_program(file)
    (line,) = error.value.problems
    assert line.startswith(f"--program '{file}': {message}") and "\n" not in line


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ('axes = ["pp", "ep"]', {"async_tp": None}),
        ('axes = ["tp"]', {"expert_dispatch": "copies", "balanced_experts": False}),
        ('weights = "fp32"', {"accumulate": "fp32"}),
        ('bases = ["ddp", "fsdp"]', {"overlaps_zero1": False}),
    ],
)
def test_what_a_file_takes_away_goes_with_what_it_had(text: str, lost: dict[str, Any], tmp_path: Any) -> None:
    found = find_program(write(tmp_path / "mine.toml", f'base = "megatron-bridge"\n{text}\n'))
    base = find_program("megatron-bridge")
    key = text.partition(" ")[0]
    assert all(getattr(base, name) != value for name, value in lost.items())
    assert found == base.model_copy(update=lost | {"name": "mine", key: getattr(found, key)})
    name = next(iter(lost))
    value = {True: "true"}.get(getattr(base, name), f'"{getattr(base, name)}"')
    with pytest.raises(PlanError, match=f"{name} = .* is of "):  # the file's own is a mistake
        find_program(write(tmp_path / "both.toml", f'base = "megatron-bridge"\n{text}\n{name} = {value}\n'))


def test_types_run_under_bare_strategies() -> None:
    plan = Plan(strategy="fsdp", precision="bf16", weights="compute", reduce="compute")
    assert not not_runnable(plan) and runnable(plan) == plan
    words = ("weights stored in the compute type", "gradients reduced in the compute type")
    changes = {"under fsdp+offload": {"strategy": "fsdp+offload"}, "in fp16": {"precision": "fp16"}}
    for beside, change in {**changes, "under zero2+lora": {"strategy": "zero2+lora"}}.items():
        assert not_runnable(plan.model_copy(update=change)) == tuple(f"{word} {beside}" for word in words)
        with pytest.raises(PlanError, match=" and ".join(words)):
            runnable(plan.model_copy(update=change))
    assert not_runnable(plan.model_copy(update={"program": "torchtune"})) == ("--program torchtune", *words)
    masters = Plan(strategy="ddp", precision="bf16", weights="masters")
    assert "set accumulate = 'compute'" in unrun_types(masters)[0]
    assert not unrun_types(masters.model_copy(update={"accumulate": "compute"}))
    assert Plan(strategy="fsdp").fingerprint == Plan(strategy="fsdp", weights="fp32", program="shardwise").fingerprint
    assert plan.fingerprint != Plan(strategy="fsdp", precision="bf16").fingerprint
    wrong = Plan(precision="fp32", weights="compute", rounding="stochastic")
    assert "take bf16" in type_problems(wrong)[0]
    assert "leave it out" in type_problems(Plan(precision="bf16", rounding="kahan"))[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.randn(2, 64, dtype=self.blocks[0].weight.dtype) if x is None else x
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def example_inputs(self) -> torch.Tensor:
        return torch.zeros(1, 64)


def test_the_note_on_what_is_not_run_says_which_option_to_leave_out() -> None:
    workload = Workload(program=find_program("trl"), seq_len=1024, global_batch=64)
    found = search(profile("gpt2"), workload, NODE)
    text = " ".join(sentences(found.candidates[0], NODE, found, 12))
    assert "but does not run it; plan without --program for the best of what it runs." in text
    assert "nothing it runs fits" not in text


@pytest.mark.parametrize("kind", ["compute", "masters", "fp32"])
def test_bytes_at_rest_are_those_of_tensors(kind: str) -> None:
    """Pure bf16 and bf16 beside fp32 masters against tensors of a real step on one process."""
    stored = torch.float32 if kind == "fp32" else torch.bfloat16
    model = Model().to(stored)
    masters = [p.detach().float().clone() for p in model.parameters()] if kind == "masters" else []
    stepped = [nn.Parameter(p) for p in masters] or list(model.parameters())
    optimizer = torch.optim.AdamW(stepped)
    model(torch.randn(2, 64, dtype=stored)).backward()
    for master, parameter in zip(masters and stepped, model.parameters(), strict=False):
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values()]
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    moments = sum(t.numel() * t.element_size() for t in state)
    program = ProgramTraits(name="test", weights=kind, accumulate="compute" if kind == "masters" else "fp32")
    plan = Plan(
        strategy="ddp", precision="bf16", device="cuda", weights=kind, accumulate=program.accumulate, micro_batch=1
    )
    found: Estimate = estimate(trace_module(Model), plan, Workload(program=program), parse_cluster("1xA100-80GB"))
    assert found.parameters == parameters
    assert found.gradients == sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())
    assert found.optimizer == moments + sum(m.numel() * m.element_size() for m in masters)
