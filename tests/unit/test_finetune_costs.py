"""What adapters, lean optimizers, the loss in chunks and offload cost: against live modules, and against arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from shardwise.cost.memory.estimate import Estimate
from shardwise.cost.memory.estimate_memory import estimate, peak_lower_bound
from shardwise.cost.memory.local_shapes import layout_of, unit_weights
from shardwise.cost.time.estimate_time import step_time
from shardwise.errors import PlanError
from shardwise.hardware.cluster import ClusterSpec
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.load_model import load_profile
from shardwise.model.lora import NF4_BYTES, NF4_PLAIN_BYTES, AdapterFacts, with_adapters
from shardwise.model.profile import ModelProfile, Unit
from shardwise.model.trace import trace_module
from shardwise.parallel.lora.adapters import parameters_in_full
from shardwise.plan.dims import dims_for
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.plan.program import SHARDWISE, ProgramTraits
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import sent_bytes
from shardwise.plan.workload import Workload
from shardwise.search.advice import search_and_advise
from shardwise.search.candidate import Candidate, Pins
from shardwise.search.cost_inputs_of_plan import adapted, with_adapter, with_plan
from shardwise.search.problem import ask
from shardwise.units import GIB
from tests.native import Native
from tests.unit.test_adapters import SHAPE

LLAMA = load_profile("llama-3.1-8b", seq_len=2048)
NODE = parse_cluster("8xA100-SXM-40GB")
BLOCK = 4 * 4096 * 4096 - 2 * 3072 * 4096 + 3 * 4096 * 14336  # weights of one block's linear layers


def plan_of(strategy: str, cluster: ClusterSpec = NODE, **more: object) -> Plan:
    dims = dims_for(parse_strategy(strategy), cluster.world_size, devices_per_node=cluster.devices_per_node)
    facts = {"strategy": strategy, "dims": dims, "micro_batch": 1, "seq_len": 2048, "precision": "bf16"}
    return Plan.model_validate({**facts, "device": "cuda", "recompute": "full"} | more)


def profile_for(strategy: str, work: Workload | None = None) -> ModelProfile:
    return adapted(LLAMA, parse_strategy(strategy), work or Workload(), "bf16")


def memory(strategy: str, profile: ModelProfile = LLAMA, work: Workload | None = None, **more: object) -> Estimate:
    return estimate(profile, plan_of(strategy, **more), work or Workload(), NODE)


def block_of(profile: ModelProfile) -> Unit:
    return next(unit for unit in profile.units if unit.kind == "block")


def kept(profile: ModelProfile) -> int:
    return sum(op.saved * 2 + op.saved_bytes for op in block_of(profile).ops)


class TestAdapterFacts:
    def test_targets_are_roles_ends_of_names_or_ops(self):
        def trained(*targets: str) -> int:
            return with_adapters(LLAMA, "lora", 8, targets).num_trainable

        assert trained("attention") + trained("mlp") == trained() == trained("all-linear")
        assert trained("q_proj", "v_proj") == trained("q", "v") == 32 * 8 * (4096 + 4096 + 4096 + 1024)
        with pytest.raises(
            PlanError, match=r"LoRA target 'q_prj' is not a linear layer .* \(did you mean 'q_proj'\?\)"
        ):
            trained("q_prj")

    def test_dropout_and_autocast_keep_a_copy_each(self):
        def beside(**facts: int) -> float:
            one, other = (
                with_adapters(LLAMA, "lora", facts=AdapterFacts(**more))  # type: ignore[arg-type]
                for more in (facts, {})
            )
            return (kept(one) - kept(other)) / (2048 * 4096 * 2)

        # seven layers read three inputs of one width and a result of 3.5; attention keeps one of them anyway
        copies = 2 + 1 + 1
        assert beside(copies_inputs=True) == copies
        assert beside(dropout=True) == copies + (6 + 3.5) / 2  # and a byte of mask for two of an element
        assert beside(dropout=True, mask_bytes=2) == copies + 6 + 3.5

    def test_quantised_layers_of_before_keep_their_inputs(self):
        now, before = (
            with_adapters(LLAMA, "qlora", facts=AdapterFacts(targets=("q",), keeps_inputs=more))
            for more in (False, True)
        )
        assert kept(before) - kept(now) == 2048 * (4096 + 14336) * 2  # the norm's result and the product's

    def test_without_double_quantisation_a_block_has_an_fp32_scale(self):
        assert pytest.approx(4.5 / 8) == NF4_PLAIN_BYTES
        plain = with_adapters(LLAMA, "qlora", facts=AdapterFacts(double_quant=False))
        more = sum(w.num_elements * w.itemsize for w in block_of(plain).weights)
        less = sum(w.num_elements * w.itemsize for w in block_of(with_adapters(LLAMA, "qlora")).weights)
        assert more - less == pytest.approx(BLOCK * (NF4_PLAIN_BYTES - NF4_BYTES))

    def test_dora_keeps_both_sides_of_its_sum(self):
        plain, dora = (with_adapters(LLAMA, "lora", facts=AdapterFacts(targets=("q",), dora=d)) for d in (False, True))
        assert kept(dora) - kept(plain) == 2 * 2048 * 4096 * 2
        assert dora.num_trainable - plain.num_trainable == 32 * 4096

    def test_a_plans_options_are_the_workloads(self):
        options = AdapterOptions(rank=4, targets=("mlp",), dropout=0.1, dora=True, double_quant=False)
        plan = plan_of("fsdp+qlora", adapter=options)
        work = with_plan(Workload(), plan)
        assert work == with_adapter(Workload(), options)
        facts = AdapterFacts(rank=4, targets=("mlp",), dropout=True, dora=True, double_quant=False)
        assert profile_for("fsdp+qlora", work) == with_adapters(LLAMA, "qlora", facts=facts)
        assert with_plan(Workload(), plan_of("fsdp")) == Workload()

    def test_whole_adapters_run_under_autocast_and_sharded_ones_do_not(self):
        assert kept(profile_for("ddp+lora")) > kept(profile_for("fsdp+lora"))
        fp32 = adapted(LLAMA, parse_strategy("ddp+lora"), Workload(), "fp32")
        assert {w.itemsize for unit in fp32.units for w in unit.weights} == {4.0}


class TestPacked:
    def test_bytes_are_those_of_bitsandbytes(self):
        from shardwise.model.transformer import profile_of
        from shardwise.parallel.lora.adapters import add_adapters
        from shardwise.parallel.lora.quantize import pack, quantized_bytes, scale_bytes

        shape = SHAPE.model_copy(update={"hidden": 256, "head_dim": 32, "ffn": 512, "layers": 2})
        module = Native(shape)
        add_adapters(module, Plan(strategy="ddp+qlora", adapter=AdapterOptions(rank=4)))
        pack(module)
        block = block_of(adapted(profile_of(shape, 64), parse_strategy("ddp+qlora"), Workload(), "fp32"))
        quantised = [w for w in block.weights if w.itemsize < 1]
        assert quantized_bytes(module) == 2 * sum(w.num_elements * (w.itemsize - w.scales) for w in quantised)
        assert scale_bytes(module) == pytest.approx(2 * sum(w.num_elements * w.scales for w in quantised), rel=0.02)

    def test_scales_are_whole_on_every_rank(self):
        block, plan = block_of(profile_for("fsdp+qlora")), plan_of("fsdp+qlora")
        one = unit_weights(replace(block, weights=tuple(w for w in block.weights if w.itemsize < 1)), layout_of(plan))
        assert one.parameters == pytest.approx(BLOCK * (0.5 / 8 + NF4_BYTES - 0.5), rel=1e-4)
        assert one.sent == BLOCK // 2  # scales do not travel

    def test_one_flat_parameter_has_the_gradient_of_all(self):
        """litgpt's LoRA: blocks under FSDP1, no reduction before the last micro batch, all in bf16."""
        profile = with_adapters(LLAMA, "lora", facts=AdapterFacts(adapter_bytes=2.0))
        plan = plan_of("fsdp+lora", grad_accum=4, gradient_sync="last")
        programs = [ProgramTraits(name="test", flat_parameters=flat, reduce="compute") for flat in (True, False)]
        plan = plan.model_copy(update={"reduce": "compute"})
        full, apart = (estimate(profile, plan, Workload(program=program), NODE) for program in programs)
        assert (full.allocated or 0) - (apart.allocated or 0) == pytest.approx(2 * 32 * BLOCK, rel=0.1)
        assert (full.optimizer, full.parameters) == (apart.optimizer, apart.parameters)


class TestLean:
    def test_the_optimizer_in_the_backward_holds_one_units_gradient(self):
        usual, early = memory("fsdp"), memory("fsdp", optimizer_in_backward=True)
        assert early.gradients < usual.gradients / 10 and early.temporaries < usual.temporaries / 10
        assert (usual.allocated or 0) - (early.allocated or 0) > 0.8 * usual.gradients
        assert peak_lower_bound(LLAMA, plan_of("fsdp", optimizer_in_backward=True), Workload()) <= (
            early.allocated or 0
        )
        one = parse_cluster("1xA100-80GB")
        work, pair = Workload(), (plan_of("ddp", one), plan_of("ddp", one, optimizer_in_backward=True))
        alone = [estimate(LLAMA, plan, work, one).allocated or 0 for plan in pair]
        assert alone[0] - alone[1] > 4 * LLAMA.num_parameters

    def test_small_weights_keep_fp32_state(self):
        def state(rows: int) -> int:
            unit = Unit("b", "block", (replace(block_of(LLAMA).weights[0], shape=(rows,)),), (), 0)
            profile = ModelProfile("m", (unit,), None, "catalogue")
            work = Workload(optimizer="adamw8bit", scalar_states=0)
            return estimate(profile, plan_of("ddp", parse_cluster("1xA100-80GB")), work, NODE).optimizer or 0

        assert state(4095) == 2 * 4 * 4095
        assert state(8192) == 2 * (8192 + 4 * 32)
        assert memory("fsdp", work=Workload(optimizer="adamw8bit")).optimizer == pytest.approx(
            LLAMA.num_parameters / 8 * (2 + 8 / 256), rel=0.01
        )
        assert (memory("fsdp", work=Workload(optimizer="adafactor")).optimizer or 0) < 0.1 * GIB

    @pytest.mark.parametrize("strategy", ["fsdp+qlora", "ddp+lora", "fsdp"])
    def test_chunks_make_logits_smaller_whether_the_head_trains_or_not(self, strategy):
        profile = profile_for(strategy) if "lora" in strategy else LLAMA
        full, parts = (memory(strategy, profile, loss_chunks=n) for n in (1, 16))
        left = 4096 * 128256 * (4 + 2) if strategy == "fsdp" else 0  # the gradient of the head's weight, and its cast
        assert left < (parts.logits or 0) < left + (full.logits or 0) / 8

    def test_narrow_adapters_have_narrow_state(self):
        wide, narrow = (with_adapters(LLAMA, "lora", facts=AdapterFacts(adapter_bytes=width)) for width in (4.0, 2.0))
        states = [memory("ddp+lora", profile).optimizer or 0 for profile in (wide, narrow)]
        assert states[0] / states[1] == pytest.approx(2, rel=0.01)


class TestOffload:
    def seconds(self, strategy: str, nvme: float | None = 6e9, profile: ModelProfile = LLAMA, **more: object) -> float:
        cluster = NODE.model_copy(update={"nvme_bytes_per_s": nvme})
        return step_time(profile, plan_of(strategy, cluster, **more), Workload(), cluster).offload_s

    def test_weights_go_up_for_each_pass_and_gradients_down_once(self):
        full, wire = LLAMA.num_parameters / 8, NODE.gpu.pcie.bytes_per_s * 0.8
        host = LLAMA.num_parameters * 28 / 60e9
        assert self.seconds("fsdp+offload") == pytest.approx(full * (2 * 4 + 4) / wire + host, rel=0.01)
        assert self.seconds("zero2+offload") == pytest.approx(full * (4 + 4) / wire + host, rel=0.01)
        assert self.seconds("deepspeed-zero3+offload") == pytest.approx(full * (2 * 2 + 4) / wire + host, rel=0.01)
        assert self.seconds("deepspeed-zero2+offload") == pytest.approx(full * (4 + 2) / wire + host, rel=0.01)
        more = self.seconds("fsdp+offload", grad_accum=3, gradient_sync="every")
        assert more == pytest.approx(full * 3 * (2 * 4 + 4) / wire + host, rel=0.01)

    def test_a_drive_reads_and_writes_states_and_weights(self):
        host = self.seconds("deepspeed-zero3+offload")
        state = LLAMA.num_parameters * 24 / 6e9
        assert self.seconds("deepspeed-zero3+offload+nvme") - host == pytest.approx(state, rel=0.01)
        weights = LLAMA.num_parameters * 2 * 3 / 6e9  # read for two passes, written once
        assert self.seconds("deepspeed-zero3+nvme") - host == pytest.approx(state + weights, rel=0.01)

    def test_a_drive_of_unknown_speed_gives_no_time(self):
        with pytest.raises(PlanError, match="deepspeed-zero3\\+nvme: the speed of a node's drives is not known"):
            self.seconds("deepspeed-zero3+nvme", None)
        pins = Pins(strategy=parse_strategy("deepspeed-zero3+nvme"))
        found = search_and_advise(LLAMA, Workload(seq_len=2048, global_batch=8), NODE, pins).candidates[0]
        assert found.time is None and found.fits
        assert found.memory.host_bytes == pytest.approx(4 * LLAMA.num_parameters), "what is swapped is not the host's"

    def test_packed_weights_travel_packed(self):
        lora, qlora = (self.seconds(f"fsdp+offload+{a}", profile=profile_for(f"fsdp+{a}")) for a in ("lora", "qlora"))
        assert qlora < 0.5 * lora


class TestAdvice:
    def lines(self, model: str, cluster: ClusterSpec | str, batch: int, pins: Pins | None = None) -> list[str]:
        found = parse_cluster(cluster) if isinstance(cluster, str) else cluster
        work = Workload(seq_len=1024, global_batch=batch)

        def command(options: object, _: object) -> str:
            return f"COMMAND {options}"

        result = search_and_advise(load_profile(model, seq_len=1024), work, found, pins or Pins(), command=command)
        assert result.recommended is None
        return list(result.advice)

    def test_adapters_where_one_small_card_is_all(self):
        """Nothing of 8 B fits a 24 GB card on a host of 64 GiB but adapters."""
        card = parse_cluster("1xRTX4090").model_copy(update={"host_memory_bytes": 64 * GIB})
        lines = self.lines("llama-3.1-8b", card, 4)
        lora, qlora = (line for line in lines if line.startswith("another training, adapters"))
        assert "adapters (LoRA) only, fits: ddp+lora, micro batch " in lora
        assert "adapters on 4-bit weights (QLoRA) only, fits: ddp+qlora, micro batch " in qlora
        assert " a step, " in qlora and " × that of ddp with memory without limit" in qlora
        assert "COMMAND {'--strategy': 'ddp+qlora'}" in qlora
        assert not any("ddp+lora" in line for line in lines if "another training" not in line)

    @pytest.mark.turns(3)
    def test_seventy_billion_on_two_cards(self):
        cards = parse_cluster("2xRTX3090").model_copy(update={"host_memory_bytes": 128 * GIB})
        lines = self.lines("llama-3.1-70b", cards, 2)
        assert any("(QLoRA) only, fits: fsdp+offload+qlora" in line for line in lines) or any(
            "(QLoRA) only, fits: fsdp+qlora" in line for line in lines
        )
        assert not any("(LoRA) only" in line for line in lines), "bf16 weights of 70 B are more than the host has"

    def test_what_leaves_the_training_as_it_is_comes_first(self):
        pins = Pins(strategy=parse_strategy("fsdp"), micro_batch=1)
        lines = self.lines("llama-3.1-8b", "8xRTX4090", 8, pins)
        starts = ("the optimizer in the backward fits: fsdp, ", "the loss in 8 chunks")
        first = next(i for i, line in enumerate(lines) if line.startswith(starts))
        offload = next(i for i, line in enumerate(lines) if line.startswith("offload fits: fsdp+offload"))
        adapters = next(i for i, line in enumerate(lines) if line.startswith("another training"))
        assert first < offload < adapters

    def test_a_drive_where_the_host_is_too_small(self):
        cards = parse_cluster("8xRTX4090").model_copy(update={"host_memory_bytes": 120 * GIB})
        pins = Pins(strategy=parse_strategy("fsdp"))
        lines = self.lines("llama-2-13b", cards, 8, pins)
        assert any(
            line.startswith("swapping to a drive fits: deepspeed-zero3+nvme") and "its time is unknown" in line
            for line in lines
        )

    def test_what_is_pinned_with_adapters_keeps_them(self):
        """The base that was frozen once is not frozen again."""
        card = parse_cluster("1xRTX4090").model_copy(update={"host_memory_bytes": 64 * GIB})
        pins = Pins(strategy=parse_strategy("ddp+lora"), micro_batch=4)
        lines = self.lines("llama-3.1-8b", card, 4, pins)
        assert any(line.startswith("micro batch ") and "fits: ddp+lora, micro batch " in line for line in lines)
        assert any(line.startswith("another training, adapters on 4-bit") for line in lines)
        assert not any("adapters (LoRA)" in line for line in lines)

    def test_options_go_only_with_what_has_them(self):
        pins = Pins(options={"optimizer_in_backward": True})
        result = search_and_advise(LLAMA, Workload(seq_len=2048, global_batch=32), NODE, pins)
        assert {c.plan.grad_accum for c in result.candidates} == {1}
        assert all(c.plan.optimizer_in_backward for c in result.candidates)
        names = {c.plan.strategy for c in result.candidates}
        assert "fsdp" in names and not any("tp" in name or "pp" in name or name in ("ddp", "zero1") for name in names)

    def test_a_plan_with_adapters_names_them(self):
        pins = Pins(strategy=parse_strategy("fsdp+qlora"))
        work = Workload(seq_len=2048, global_batch=8, lora_rank=4, lora_targets=("mlp",))
        best: Candidate = search_and_advise(LLAMA, work, NODE, pins).candidates[0]
        assert best.plan.adapter == AdapterOptions(rank=4, targets=("mlp",))
        question = ask(LLAMA, work, NODE, pins)
        assert question.plain is LLAMA and question.profile.num_trainable == 32 * 4 * 3 * (4096 + 14336)


def test_the_counts_of_live_adapters_are_the_planners():
    from shardwise.model.transformer import profile_of
    from shardwise.parallel.lora.adapters import add_adapters

    options = AdapterOptions(rank=3, targets=("attention", "up_proj"), dora=True)
    module: nn.Module = Native(SHAPE)
    add_adapters(module, Plan(strategy="ddp+lora", adapter=options))
    live = sum(p.numel() for p in module.parameters() if p.requires_grad)
    work = with_adapter(Workload(), options)
    assert adapted(profile_of(SHAPE, 64), parse_strategy("ddp+lora"), work, "fp32").num_trainable == live
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_packed_weights_are_sent_as_half_a_byte_and_only_gradients_of_adapters():
    plan = plan_of("fsdp+qlora", adapter=AdapterOptions())
    profile = adapted(LLAMA, plan.parsed, with_plan(Workload(), plan), plan.precision)
    packed = 32 * BLOCK
    gathered = packed * 0.5 + (profile.num_parameters - packed) * 2
    sent = sent_bytes(profile, plan, SHARDWISE)["dp"]
    assert sent == pytest.approx((2 * gathered + 4 * profile.num_trainable) * 7 / 8)
    full = sent_bytes(LLAMA, plan_of("fsdp"), SHARDWISE)["dp"]
    assert full == pytest.approx((2 * 2 + 4) * LLAMA.num_parameters * 7 / 8)


@pytest.mark.parametrize(
    "wanted",
    [
        ["model.layers.2.mlp"],
        ["layers.0.mlp.gate_proj", "layers.3.input_layernorm", "model.layers.3.mlp"],
        ["mlp"],
        ["model.norm", "layers.1.post_attention_layernorm"],
        ["model.embed_tokens"],
        ["lm_head"],
        ["model.layers.1.mlp.up_proj", "post_attention_layernorm"],
    ],
)
def test_what_is_trained_in_full_is_counted_by_any_of_its_names(wanted: list[str], tmp_path: Path) -> None:
    settings = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=wanted != ["lm_head"],
    )  # fmt: skip
    with torch.device("meta"):
        live = transformers.AutoModelForCausalLM.from_config(settings)
    sizes = {name: parameter.numel() for name, parameter in live.named_parameters()}
    whole = sum(sizes.get(name, 0) for name in parameters_in_full(live, wanted))
    (tmp_path / "config.json").write_text(settings.to_json_string())
    traced = trace_module(lambda: transformers.AutoModelForCausalLM.from_config(settings), seq_len=64, name="live")
    for profile in (traced, load_profile(str(tmp_path), seq_len=64)):
        made, plain = (
            with_adapters(profile, "lora", facts=AdapterFacts(targets=("attention",), modules_to_save=names))
            for names in (tuple(wanted), ())
        )
        counts = [sum(unit.num_trainable * unit.count for unit in one.units) for one in (made, plain)]
        assert whole and counts[0] - counts[1] == whole, profile.name
        assert made.num_parameters == plain.num_parameters
