"""Mixtures of experts: counts equal to transformers' own modules, costs by hand, ranks that share experts."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from shardwise.cost.expert_load import EXPERT_SPREAD, fullest_load
from shardwise.cost.flops import palm_flops
from shardwise.cost.memory.estimate_memory import estimate
from shardwise.cost.memory.expert_shards import rest_shape, shard_dim
from shardwise.cost.memory.local_shapes import layout_of, stage_pieces, unit_weights
from shardwise.cost.memory.optimizer_shards import optimizer_bytes
from shardwise.cost.time.estimate_time import step_time
from shardwise.cost.time.expert_time import resort_s, routed_ops
from shardwise.cost.time.layer_time import WorkSplit, op_s, unit_time
from shardwise.cost.time.machine import machine_of
from shardwise.cost.time.overlap import CONTENTION
from shardwise.errors import ModelError, PlanError
from shardwise.hardware.parse_cluster import parse_cluster
from shardwise.model.architecture import architecture_from_config, parameter_count
from shardwise.model.catalogue import catalogue_names, configuration_of, find_architecture
from shardwise.model.load_model import load_profile
from shardwise.model.lora import with_adapters
from shardwise.model.profile import Weight
from shardwise.model.transformer import profile_of
from shardwise.plan.dims import dims_for
from shardwise.plan.plan import Plan
from shardwise.plan.program import SHARDWISE, ProgramTraits, find_program
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.traffic import data_traffic, sent_bytes
from shardwise.plan.workload import Workload
from shardwise.receipts.expected_experts import experts_alone
from shardwise.report.plan_json import document
from shardwise.search.candidate import Pins
from shardwise.search.search import search

SMALL = {
    "num_hidden_layers": 5,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "moe_intermediate_size": 24,
}
LATENT = {"q_lora_rank": 33, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
OWN = LATENT | {"num_key_value_heads": 6, "n_group": 4, "topk_group": 2}
VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("mixtral", {}),
    ("mixtral", {"head_dim": 24, "num_local_experts": 4, "tie_word_embeddings": True}),
    ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    ("qwen2_moe", {"num_experts": 7, "shared_expert_intermediate_size": 48}),
    ("qwen2_moe", {"num_experts": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3], "qkv_bias": False}),
    ("qwen2_moe", {"num_experts": 0}),
    ("qwen3_moe", {"num_experts": 12, "head_dim": 20, "decoder_sparse_step": 3}),
    ("qwen3_moe", {"num_experts": 12, "mlp_only_layers": [0, 4], "attention_bias": True}),
    ("deepseek_v2", OWN | {"q_lora_rank": None, "num_experts_per_tok": 2}),
    ("deepseek_v2", OWN | {"num_experts_per_tok": 2, "first_k_dense_replace": 2, "n_shared_experts": 3}),
    ("deepseek_v3", OWN | {"n_routed_experts": 16, "first_k_dense_replace": 2, "attention_bias": True}),
    ("deepseek_v3", OWN | {"n_routed_experts": 16, "first_k_dense_replace": 9, "tie_word_embeddings": True}),
    ("deepseek_v3", OWN | {"n_routed_experts": 16, "num_mtp_layers": 2}),  # which transformers does not build
    ("glm4_moe", {"n_routed_experts": 8, "head_dim": 16}),
    ("glm4_moe", {"n_routed_experts": 8, "num_attention_heads": 10}),
    ("glm4_moe", {"n_routed_experts": 8, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    ("gpt_oss", {"num_local_experts": 4, "head_dim": 24}),
    ("gpt_oss", {"num_local_experts": 4, "head_dim": 24, "attention_bias": False}),
    ("olmoe", {"num_experts": 16}),
    ("llama4_text", {"head_dim": 16, "intermediate_size_mlp": 144}),
    ("llama4_text", {"head_dim": 16, "intermediate_size_mlp": 144, "interleave_moe_layer_step": 2}),
    ("llama4_text", {"head_dim": 16, "intermediate_size_mlp": 144, "moe_layers": [1, 4]}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True}),
    ("granitemoe", {"tie_word_embeddings": True}),
    ("granitemoeshared", {"shared_intermediate_size": 48}),
]
MIXTURES = [name for name in catalogue_names() if (a := find_architecture(name)) is not None and a.mixture is not None]


def built(family: str, keys: dict[str, object]) -> tuple[int, object]:
    """Elements of transformers' own causal model of a configuration, on the meta device; and the configuration."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[family](**{k: v for k, v in keys.items() if k != "model_type"})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in module.parameters()), config


@pytest.mark.parametrize(("family", "own"), VARIANTS, ids=[f"{k}-{i}" for i, (k, _) in enumerate(VARIANTS)])
def test_as_many_parameters_as_transformers_builds(family, own):
    keys = SMALL | own
    found = architecture_from_config(keys | {"model_type": family})
    assert found is not None
    assert parameter_count(found) == profile_of(found, 64).num_parameters == built(family, keys)[0]


@pytest.mark.parametrize("name", MIXTURES)
def test_each_mixture_of_the_catalogue_is_transformers_own(name):
    """With few layers, dense and sparse ones among them; a layer more is a layer more in both."""
    keys = configuration_of(name) | {"num_hidden_layers": 5}
    found = architecture_from_config(keys, name)
    assert found is not None and found.mixture is not None and any(found.mixture.sparse)
    assert parameter_count(found) == built(str(keys["model_type"]), keys)[0]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # billions, as the reports of the models state them; those active without embedding and head where told
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 140.6, 39.2),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("deepseek-v2", 235.7, 21.4),
        ("deepseek-v3", 671.0, 37.6),
        ("llama-4-maverick", 400.7, 17.2),
        ("phi-3.5-moe", 41.9, 6.6),
        ("olmoe-1b-7b", 6.9, 1.3),
    ],
)
def test_totals_and_active_parameters_are_those_of_the_reports(name, total, active):
    profile = profile_of(find_architecture(name), 128)
    assert profile.num_parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert profile.num_active / 1e9 == pytest.approx(active, abs=0.06)


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("mixtral", {}),
        ("deepseek_v3", OWN | {"n_routed_experts": 16, "first_k_dense_replace": 2}),
        ("gpt_oss", {"num_local_experts": 8, "head_dim": 24}),
        ("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 48}),
    ],
)
def test_the_closed_form_is_what_the_trace_of_the_module_gives(tmp_path, family, own):
    total, config = built(family, SMALL | own)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    counted = load_profile(str(tmp_path), seq_len=64)
    traced = load_profile(str(tmp_path), seq_len=64, traced=True)
    assert counted.num_parameters == traced.num_parameters == total
    assert counted.num_active == pytest.approx(traced.num_active)
    assert counted.experts == traced.experts > 1

    def products(profile):
        each = [(op.m, op.k, op.n, op.experts) for u in profile.units for op in u.ops for _ in range(u.count)]
        return sorted(one for one in each if one[3])

    assert [one for one in products(traced) if one[1]] == [one for one in products(counted) if one[1]]


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("dots1", {"n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 16, "first_k_dense_replace": 1}),
        ("minimax_m2", {"num_local_experts": 8, "head_dim": 16}),
        ("qwen3_next", {"num_experts": 8, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}),
    ],
)
def test_a_family_without_a_closed_form_is_traced(tmp_path, family, own):
    total, config = built(family, SMALL | {"num_hidden_layers": 4, "num_experts_per_tok": 2} | own)
    assert architecture_from_config(config.to_dict()) is None
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    found = load_profile(str(tmp_path), seq_len=64)
    assert found.num_parameters == total
    assert found.experts == 8 and found.num_active < total


def test_a_model_that_casts_its_weights_in_the_forward_is_refused_by_that_reason(tmp_path):
    keys = {"d_model": 64, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 64, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(keys | {"model_type": "switch_transformers"}))
    with pytest.raises(
        ModelError, match=r"its forward moves or casts its own weights .* plan another model of its size"
    ):
        load_profile(str(tmp_path), seq_len=32)


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, ["num_experts_per_tok is 9, more than its 8 experts"]),
        ("qwen3_moe", {"num_experts": -1, "moe_intermediate_size": "wide"}, ["num_experts is -1", "is 'wide'"]),
        ("deepseek_v3", {"kv_lora_rank": 0, "first_k_dense_replace": None}, ["kv_lora_rank is 0", "is None"]),
        ("deepseek_v2", {}, ["num_experts_per_tok is None, it must be a positive integer"]),
        ("qwen2_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step is 0, it must be a positive integer"]),
        ("qwen3_moe", {"mlp_only_layers": "0,1"}, ["mlp_only_layers is '0,1', it must be a list of layer numbers"]),
        ("qwen3_moe", {"mlp_only_layers": [[0]]}, ["mlp_only_layers is [[0]], it must be"]),
        ("llama4_text", {"moe_layers": 3}, ["moe_layers is 3, it must be a list of layer numbers"]),
    ],
)
def test_all_wrong_sizes_are_told_at_once(family, keys, says):
    with pytest.raises(ModelError) as raised:
        architecture_from_config(keys | {"model_type": family}, "mine")
    assert len(raised.value.problems) == len(says)
    assert all(part in str(raised.value) for part in says)


def test_what_a_configuration_states_and_nobody_builds_is_told():
    keys = SMALL | OWN | {"model_type": "deepseek_v3", "n_routed_experts": 16}
    plain = architecture_from_config(keys)
    stated = {"num_nextn_predict_layers": 2, "moe_layer_freq": 2, "quantization_config": {"quant_method": "fp8"}}
    more = architecture_from_config(keys | stated)
    assert plain is not None and more is not None
    assert parameter_count(plain) == parameter_count(more)
    profile = profile_of(more, 64)
    cluster, workload = parse_cluster("8xH100-SXM"), Workload(seq_len=64, global_batch=8)
    answer = document(profile, cluster, workload, search(profile, workload, cluster), notes=("a default",))
    for told in (profile.unknown, answer.notes):
        for words in ("multi-token prediction", "moe_layer_freq 2", "stored in fp8"):
            assert sum(words in one for one in told) == 1, (words, told)


def plan_for(strategy: str, world: int, **own) -> Plan:
    dims = dims_for(parse_strategy(strategy), world, devices_per_node=8)
    facts = {"micro_batch": 1, "grad_accum": 4, "seq_len": 4096, "precision": "bf16", "device": "cuda"}
    return Plan.model_validate({"strategy": strategy, "dims": dims} | facts | own)


class TestMemory:
    @pytest.mark.parametrize("world", [8, 16, 64])
    @pytest.mark.parametrize("ep", [2, 4, 8])
    @pytest.mark.parametrize("base", ["fsdp", "ddp", "hsdp"])
    def test_all_ranks_together_have_each_weight_once_per_replica(self, base, ep, world):
        if base == "hsdp" and (world, ep) == (8, 8):
            pytest.skip("half of a node is a replica of four ranks")
        profile = profile_of(find_architecture("mixtral-8x7b"), 128)
        plan = plan_for(f"{base}+ep{ep}", world)
        layout, block = layout_of(plan), profile.units[1]
        routed = sum(w.num_elements for w in block.weights if w.experts)
        shards = plan.dims.dp_shard if base != "ddp" else 1
        rows = [w.shape for w in block.weights if not w.experts]
        rest = sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in rows)
        own = plan.dims.expert_shards if base != "ddp" else 1
        assert unit_weights(block, layout).parameters == 4 * (routed // ep // own + rest)
        state = optimizer_bytes(stage_pieces(profile, layout, 0)[1:2], layout, Workload())
        assert state == 32 * (
            8 * (routed // ep // own + rest) + 4 * len(block.weights)
        )  # two fp32 tensors and a counter

    def test_fewer_experts_than_ranks_are_sharded_along_their_rows(self):
        stacked = Weight("experts.up", (8, 96, 64), experts=8, active=0.25)
        assert shard_dim(stacked, (8, 96, 64), 8) == 0
        assert rest_shape(stacked, (8, 96, 64), 4) == (2, 96, 64)
        assert rest_shape(stacked, (8, 96, 64), 32) == (8, 3, 64)
        assert rest_shape(stacked, (8, 96, 64), 32, whole=True) == (1, 96, 64)
        assert rest_shape(stacked, (8, 96, 64), 64) == (8, 96, 1)  # 64 does not divide the rows
        assert rest_shape(stacked, (8, 96, 64), 5) == (2, 96, 64)
        assert rest_shape(Weight("up", (8, 96)), (8, 96), 32) == (1, 96)

    def test_a_tensor_parallel_rank_has_parts_of_all_experts_or_some_whole(self):
        profile = profile_of(find_architecture("mixtral-8x7b"), 128)
        block = profile.units[1]
        routed = sum(w.num_elements for w in block.weights if w.experts)
        norms_and_router = sum(w.num_elements for w in block.weights if w.tp_dim is None)
        rest = block.num_elements - routed - norms_and_router
        cut = unit_weights(block, layout_of(plan_for("ddp+tp4", 4, precision="fp32"))).parameters
        assert cut == 4 * ((routed + rest) // 4 + norms_and_router)
        whole = unit_weights(block, layout_of(plan_for("ddp+tp4+ep8", 8, precision="fp32"))).parameters
        assert whole == 4 * (routed // 8 + rest // 4 + norms_and_router)

    def test_megatrons_layout_shards_states_over_the_ranks_that_have_the_same_experts(self):
        profile, cluster = profile_of(find_architecture("deepseek-v2-lite"), 4096), parse_cluster("16xH100-SXM")
        found = {ep: estimate(profile, plan_for(f"zero1+ep{ep}", 16), Workload(), cluster) for ep in (2, 8)}
        routed = sum(w.num_elements * u.count for u in profile.units for w in u.weights if w.experts)
        rest = profile.num_parameters - routed
        for ep, one in found.items():
            assert one.parameters == 2 * (routed // ep + rest)
            assert one.optimizer == pytest.approx(
                12 * (routed / 16 + rest / 16), rel=1e-4
            )  # 12 bytes, once per replica

    def test_a_trained_router_fills_the_fullest_rank_more_than_a_balanced_one(self):
        profile, cluster = profile_of(find_architecture("qwen3-30b-a3b"), 4096), parse_cluster("8xH100-SXM")
        plan = plan_for("fsdp+ep8", 8)
        kept = [
            estimate(
                profile, plan, Workload(program=ProgramTraits(balanced_experts=even), capacity_factor=factor), cluster
            ).activations
            for even, factor in ((True, None), (False, None), (False, 2.0))
        ]
        assert kept[0] < kept[1] < kept[2]
        assert fullest_load(128, 8, 0.5) == pytest.approx(1 + EXPERT_SPREAD * math.sqrt(8 / 128) * 1.3852, rel=1e-3)
        less = (3 / (58 / 6)) ** 0.5
        assert fullest_load(8, 8, 0.5, share=0.25) - 1 == pytest.approx(EXPERT_SPREAD * 1.3852 * less, rel=1e-3)
        assert fullest_load(8, 1, 0.99) == 1.0 and fullest_load(8, 8, 0.99, 1.25) == 1.25


class TestAdapters:
    """What peft adapts of a module that transformers built, against the profile."""

    @pytest.mark.parametrize(
        ("family", "own"),
        [
            ("mixtral", {}),
            ("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
            ("olmoe", {"num_experts": 16}),
            ("phimoe", {}),
            ("deepseek_v3", OWN | {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 2}),
        ],
    )
    @pytest.mark.parametrize("targets", [(), ("attention",)])
    def test_adapters_are_as_many_as_peft_makes(self, family, own, targets):
        import torch
        import transformers

        from shardwise.parallel.lora.adapters import add_adapters
        from shardwise.plan.lora_options import AdapterOptions

        _, config = built(family, SMALL | own)
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config)
        rank = 1 if "shared_expert_intermediate_size" in own else 4  # its gate has one row
        options = AdapterOptions(rank=rank, targets=targets or ("all-linear",))
        plan = plan_for("fsdp+lora", 2, seq_len=64).model_copy(update={"adapter": options})
        add_adapters(module, plan, real=False)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        assert not any(".experts." in name for name, p in module.named_parameters() if p.requires_grad)
        found = architecture_from_config(config.to_dict() | {"model_type": family})
        assert found is not None
        profile = with_adapters(profile_of(found, 64), "lora", rank, targets)
        assert profile.num_trainable == trained
        assert any("experts have no adapters" in note for note in profile.unknown)

    def test_experts_keep_their_width_and_get_no_gradient(self):
        profile = with_adapters(profile_of(find_architecture("mixtral-8x7b"), 128), "qlora")
        block = profile.units[1]
        routed = [w for w in block.weights if w.experts]
        assert all(w.itemsize == 2 and not w.trainable for w in routed)
        assert all(w.itemsize < 1 for w in block.weights if w.name.endswith(("q_proj.weight", "o_proj.weight")))
        products = [op for op in block.ops if op.kind == "matmul" and op.experts]
        assert len(products) == 2 and not any(op.weight or op.saved for op in products)

    @pytest.mark.parametrize("target", ["experts", "gate_up_proj"])
    def test_experts_as_a_target_are_refused_by_name(self, target):
        with pytest.raises(PlanError, match=f"LoRA target '{target}' is a stack of experts.*name some of.*o_proj"):
            with_adapters(profile_of(find_architecture("mixtral-8x7b"), 128), "lora", 4, (target,))


class TestTime:
    CLUSTER = parse_cluster("2x8xH100-SXM")
    PROFILE = profile_of(find_architecture("qwen3-30b-a3b"), 4096)

    def test_a_token_that_goes_once_to_each_node_sends_less_by_the_nodes_that_its_experts_are_on(self):
        """8 of 128 experts, drawn evenly over 2 nodes of 8: both nodes with 1 − 2·C(64, 8)/C(128, 8), else one."""
        plan, copies = plan_for("fsdp+ep16", 16, micro_batch=32), SHARDWISE.model_copy(update={"name": "other"})
        ranks, hidden = (
            copies.model_copy(update=one) for one in ({"expert_dispatch": "ranks"}, {"overlaps_dispatch": True})
        )
        many, once, behind = (
            step_time(self.PROFILE, plan, Workload(program=program), self.CLUSTER)
            for program in (copies, ranks, hidden)
        )
        nodes = 2 * (1 - math.comb(64, 8) / math.comb(128, 8))
        assert once.exposed_ep_s == pytest.approx(many.exposed_ep_s * nodes / 8, rel=0.02)  # but for what starts them
        assert once.compute_s < many.compute_s, "no copies are made to be sent"
        assert behind.exposed_ep_s < many.exposed_ep_s

    @pytest.mark.parametrize("name", ["megatron-bridge", "megatron-bridge-overlap"])
    def test_the_search_does_not_miss_what_a_program_sends_less_for(self, name):
        workload = Workload(program=find_program(name), seq_len=4096, global_batch=256)
        cluster = parse_cluster("8x8xH100-SXM")
        free, *pinned = (
            search(self.PROFILE, workload, cluster, Pins(strategy=strategy and parse_strategy(strategy))).candidates[0]
            for strategy in (None, "zero1+ep8", "zero1+ep16")
        )
        assert free.time.step_s <= 1.05 * min(one.time.step_s for one in pinned)

    @pytest.mark.parametrize(
        ("own", "hidden"),
        [({}, 0.75), ({"grad_accum": 1}, 0.0), ({"recompute": "full"}, 0.0), ({"strategy": "pp"}, 0.0)],
    )
    def test_what_experts_exchange_is_hidden_where_another_micro_batch_computes(self, own, hidden):
        """3 of 4 micro batches have another beside them; Megatron-LM has no overlap for the other plans."""
        cluster, strategy = parse_cluster("2x8xH100-SXM"), "zero1+pp2+ep8" if own.pop("strategy", None) else "zero1+ep8"
        many, behind = (
            step_time(
                self.PROFILE,
                plan_for(strategy, 16, micro_batch=2, **own),
                Workload(program=SHARDWISE.model_copy(update={"name": "other", "overlaps_dispatch": overlaps})),
                cluster,
            )
            for overlaps in (False, True)
        )
        part = 1 - hidden * (1 - CONTENTION)
        assert behind.exposed_ep_s == pytest.approx(many.exposed_ep_s * part)

    def test_rows_from_other_ranks_are_sorted_once_more_and_back(self):
        machine, unit = machine_of(self.CLUSTER, "bf16"), next(u for u in self.PROFILE.units if u.experts)
        moved = 4 * (4096 * 8) * 2048 * 2  # read and write, to and fro, of 8 copies of each token in bf16
        assert resort_s(machine, unit, 8, 1.0, 2) == machine.memory_s(moved) and resort_s(machine, unit, 1, 1.0, 2) == 0
        split = WorkSplit(tp=1, cp=1, micro=1, precision="bf16", recompute="none", compiled=False, ep=8)
        of_ops = sum(sum(op_s(machine, unit, op, split)) for op in unit.ops)
        found = unit_time(machine, unit, split)
        sorting = 2 * resort_s(machine, unit, 8, split.experts_of(routed_ops(unit)[0])[0], 2)
        assert found.forward_s + found.backward_s == pytest.approx(of_ops + sorting)

    def test_parts_add_up_and_exchanges_are_the_experts_own(self):
        time = step_time(self.PROFILE, plan_for("fsdp+ep8", 16), Workload(), self.CLUSTER)
        parts = sum(getattr(time, name) for name in type(time).model_fields if name.startswith("exposed"))
        parts += time.compute_s + time.recompute_s + time.pipeline_s + time.optimizer_s + time.offload_s + time.host_s
        assert parts == pytest.approx(time.step_s)
        alone = step_time(self.PROFILE, plan_for("fsdp", 16), Workload(), self.CLUSTER)
        assert time.exposed_ep_s > 0 == alone.exposed_ep_s
        assert time.exposed_dp_s < alone.exposed_dp_s, "experts are gathered by the ranks that share them alone"

    def test_fewer_tokens_an_expert_cost_more_time_a_token(self):
        short = replace(self.PROFILE)
        times = [
            step_time(short, plan_for("fsdp+ep8", 16, micro_batch=n, grad_accum=8 // n), Workload(), self.CLUSTER)
            for n in (1, 8)
        ]
        assert times[0].compute_s > times[1].compute_s

    def test_utilisation_counts_the_experts_that_a_token_uses(self):
        flops = palm_flops(self.PROFILE)
        square = 12 * 48 * 4096 * 4096 * 32 * 128 / 1
        assert flops == pytest.approx(6 * self.PROFILE.num_active * 4096 + square)
        assert self.PROFILE.num_active < self.PROFILE.num_parameters / 8

    def test_what_is_sent_to_experts(self):
        plan = plan_for("fsdp+ep8", 16)
        sent = sent_bytes(self.PROFILE, plan, SHARDWISE)
        copies = 4096 * 8 * 2048 * 2 * 48  # tokens × experts a token × width × bf16 × layers
        assert sent["ep"] == 4 * 4 * copies * 7 / 8
        assert sent["dp"] < sent_bytes(self.PROFILE, plan_for("fsdp", 16), SHARDWISE)["dp"] / 4
        again = sent_bytes(self.PROFILE, plan_for("fsdp+ep8", 16, recompute="full"), SHARDWISE)
        assert again["ep"] == 6 / 4 * sent["ep"], "recompute needs what the experts sent back: it is weighed afterwards"

    def test_recompute_repeats_both_exchanges_where_results_are_weighed_after_them(self):
        waits = []
        for recompute in ("none", "full"):
            plan = plan_for("fsdp+ep8", 16, recompute=recompute)
            own, other = (
                step_time(self.PROFILE, plan, Workload(program=program), self.CLUSTER).exposed_ep_s
                for program in (SHARDWISE, find_program("torchtitan"))
            )
            waits.append((own, other))
        assert waits[1][0] / waits[0][0] == pytest.approx(6 / 4)
        assert waits[1][1] / waits[0][1] == pytest.approx(5 / 4)


def test_parameters_of_experts_are_stepped_by_the_ranks_that_have_them():
    keys = SMALL | {"model_type": "qwen3_moe", "num_experts": 16, "head_dim": 20, "num_hidden_layers": 32}
    found = architecture_from_config(keys)
    assert found is not None
    model, workload = profile_of(found, 64), Workload(seq_len=64)
    layout = replace(layout_of(plan_for("zero1", 16)), ep=8, flat_state=False, masters=False)
    held = optimizer_bytes(stage_pieces(model, layout, 0), layout, workload)
    experts = sum(w.num_elements * u.count for u in model.units for w in u.weights if w.experts)
    assert held is not None and held >= experts * 8 / 16  # each of 8 groups of 2 ranks has an eighth of them


@pytest.mark.parametrize(("strategy", "kept"), [("fsdp+ep2", 1), ("fsdp+pp2+ep2", 0)])
def test_the_ranks_of_an_expert_keep_the_last_block_as_all_ranks_do(strategy: str, kept: int):
    """Without its stages, a plan would expect that the last expert layer of each one stays gathered."""
    plan = Plan(strategy=strategy, dims=dims_for(parse_strategy(strategy), 8), device="cpu")
    alone = experts_alone(plan, plan.dims.dp * plan.dims.cp // plan.dims.ep)
    assert data_traffic(plan).kept == data_traffic(alone).kept == kept
    assert alone.dims.dp * plan.dims.ep == plan.dims.dp
