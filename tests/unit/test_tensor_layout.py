"""How models are cut over tensor-parallel ranks, decided without ranks: layouts as data, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.model.read import read_model
from shardwise.parallel.tensor_parallel.parallelize import tensor_layout
from shardwise.parallel.tensor_parallel.tensor_layout import TensorLayout, chunk
from shardwise.plan.dims import ParallelDims
from shardwise.plan.plan import Plan
from tests.families import FAMILIES, HEADS, INNER, KV_HEADS, VOCAB, WIDTH, configuration, family

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": KV_HEADS}


def layout(module: nn.Module, tp: int = 2, sample: Any = None, styles: Any = None, **options: Any) -> TensorLayout:
    plan = Plan(strategy=f"ddp+tp{tp}", dims=ParallelDims(tp=tp), **options)
    return tensor_layout(module, read_model(module), plan, sample, styles)


def refused(module: nn.Module, tp: int = 2, sample: Any = None, styles: Any = None, **options: Any) -> list[str]:
    with pytest.raises(ModelError) as caught:
        layout(module, tp, sample, styles, **options)
    return list(caught.value.problems)


def test_a_llama_as_data() -> None:
    found = layout(family("llama", layers=2))
    assert found.styles == {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.embed_tokens": "embedding",
        "lm_head": "colwise_gather_output",
    }
    dims = {name.removeprefix("model.layers.1."): dim for name, dim in found.shard_dim.items() if "layers.1." in name}
    assert dims == {
        **{f"self_attn.{name}_proj.weight": 0 for name in "qkv"},
        **{f"mlp.{name}_proj.weight": 0 for name in ("gate", "up")},
        "self_attn.o_proj.weight": 1,
        "mlp.down_proj.weight": 1,
    }
    assert found.shard_dim["lm_head.weight"] == found.shard_dim["model.embed_tokens.weight"] == 0
    assert not found.notes
    assert (found.first, found.last) == ("model.layers.0", "model.layers.1")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [2, 4])
def test_nothing_of_the_model_changes(name: str, tp: int) -> None:
    module = family(name, layers=2)
    tensors = {k: v.clone() for k, v in itertools.chain(module.named_parameters(), module.named_buffers())}
    facts = {path: {k: repr(v) for k, v in vars(part).items()} for path, part in module.named_modules()}
    random = torch.get_rng_state()
    found = layout(module, tp)
    assert facts == {path: {k: repr(v) for k, v in vars(part).items()} for path, part in module.named_modules()}
    assert torch.equal(random, torch.get_rng_state())
    for key, value in itertools.chain(module.named_parameters(), module.named_buffers()):
        assert torch.equal(value, tensors[key])
    with torch.device("meta"):
        weightless = family(name, layers=2)
    assert layout(weightless, tp) == found


def test_norms_between_columns_and_rows_have_parts_of_a_gradient() -> None:
    for sequence in (True, False):
        modules = layout(family("qwen3", layers=2), sequence_parallel=sequence).modules
        assert modules["model.layers.0.self_attn.q_norm"].local["weight"].partial
        assert modules["model.layers.0.self_attn.k_norm"].local["weight"].partial
        assert modules["model.layers.0.input_layernorm"].local["weight"].partial is sequence
        assert not modules["model.norm"].local["weight"].partial


def test_key_value_heads_fewer_than_ranks_are_shared() -> None:
    found = layout(family("llama", layers=2), 4)
    local = found.modules["model.layers.0.self_attn.k_proj"].local["weight"]
    assert local.uses == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
    assert not found.modules["model.layers.0.self_attn.q_proj"].local["weight"].uses
    assert found.attributes["model.layers.0.self_attn"] == {"num_key_value_groups": 1}


def test_fused_projections_are_taken_apart() -> None:
    for name, module in (("transformer.h.0.attn.c_attn", "gpt2"), ("blocks.0.attention.qkv", "own")):
        found = layout(family(module, layers=2))
        local = found.modules[name].local
        assert local["weight"].uses == (((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96)))
        assert local["bias"].uses == local["weight"].uses
        assert found.shard_dim[f"{name}.weight"] == (1 if module == "gpt2" else 0)
    assert found.attributes["blocks.0.attention"] == {"n_head": 2, "width": 16}


def test_a_fused_projection_with_heads_outermost_is_told_from_one_with_heads_innermost() -> None:
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL))
    local = layout(neox).modules["gpt_neox.layers.0.attention.query_key_value"].local["weight"]
    assert local.dim == 0
    assert not local.uses  # the plain halves are whole heads, each with its query, key and value


def test_numbers_in_a_shared_configuration_are_changed_in_a_copy() -> None:
    module = transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED))
    found = layout(module)
    assert found.attributes["model.layers.0.self_attn"] == {"config.num_attention_heads": 2, "num_key_value_heads": 1}
    assert module.config.num_attention_heads == HEADS


def test_attention_that_is_written_out() -> None:
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, attn_implementation="eager"))
    assert layout(module, 4).attributes["model.layers.0.self_attn"] == {"num_key_value_groups": 1}


def test_a_parameter_for_each_head_is_cut_with_the_heads() -> None:
    config = transformers.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    found = layout(transformers.GptOssForCausalLM(config))
    assert found.shard_dim["model.layers.0.self_attn.sinks"] == 0
    assert any("experts" in note for note in found.notes)


def test_the_gate_of_a_soft_cap_does_not_hinder_loss_parallel() -> None:
    module = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GROUPED, head_dim=8))
    found = layout(module, loss_parallel=True)
    assert found.logits == "logits"
    assert found.styles["lm_head"] == "colwise_loss"
    assert found.shard_dim["model.embed_tokens.weight"] == 0  # which is the head's


def test_a_tied_embedding_stays_with_its_head() -> None:
    found = layout(family("gemma", layers=2))
    assert found.styles["model.embed_tokens"] == "embedding"
    assert "lm_head.weight" not in found.shard_dim  # it has one name


def test_dropout_is_said_aloud() -> None:
    config = configuration("gpt2", 2)
    config.resid_pdrop = 0.1
    (note,) = layout(transformers.GPT2LMHeadModel(config)).notes
    assert note.startswith(
        "dropout (transformer.h.0.attn.resid_dropout 0.1): the ranks of a tensor-parallel group draw"
    )


def test_a_real_sample_may_be_long() -> None:
    module = family("own", layers=2)
    sample = torch.zeros(64, 64, dtype=torch.int64)
    assert layout(module, sample=sample) == layout(module)


def test_a_large_model_takes_neither_memory_nor_long() -> None:
    kind = {**GROUPED, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 32000}
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**kind, "num_hidden_layers": 32, "num_key_value_heads": 8})
        )
    found = layout(module, 8)
    assert len(found.shard_dim) == 32 * 7 + 2


def test_own_styles() -> None:
    module = family("own", layers=2)
    styles = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
    found = layout(module, styles=styles, sequence_parallel=False)
    assert found.styles == styles
    assert found.notes[0].startswith("not sharded by tensor parallel: blocks.*.attention.out, blocks.*.attention.qkv")
    module.tp_styles = styles
    assert layout(module, sequence_parallel=False).styles == styles


# what is refused


def test_styles_that_are_not() -> None:
    problems = refused(
        family("own", layers=2),
        styles={"blocks.*.mlp.0": "colwize", "blocks.*.mpl.2": "rowwise", "blocks.*.attention.qkv": "sideways"},
    )
    assert problems == [
        "tp_styles 'blocks.*.mlp.0': there is no style 'colwize' (did you mean 'colwise'?)",
        "tp_styles 'blocks.*.mpl.2' matches no linear layer or embedding (did you mean 'blocks.*.mlp.2'?)",
        "tp_styles 'blocks.*.attention.qkv': there is no style 'sideways'; styles are colwise, embedding, replicate, "
        "rowwise",
    ]


def test_styles_that_do_not_go_together() -> None:
    alone = refused(family("own", layers=2), styles={"blocks.*.mlp.0": "colwise"})
    assert "blocks.0.mlp.0 is colwise, and blocks.0.mlp.2, which reads it, is not rowwise" in alone
    other = refused(family("own", layers=2), styles={"blocks.*.mlp.2": "rowwise"})
    assert "blocks.0.mlp.2 is rowwise, but nothing that it reads is colwise" in other


def test_heads_that_do_not_divide() -> None:
    kind = {**GROUPED, "hidden_size": 48, "num_attention_heads": 6}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kind))
    assert refused(module, 4) == ["model.layers.0 has 6 attention heads, which tp 4 does not divide; use tp 2, 6"]
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**kind, "num_key_value_heads": 2}))
    assert refused(module, 3) == [
        "model.layers.0 has 2 key/value heads: neither does tp 3 divide them nor they tp; use tp 2, 6"
    ]


def test_a_width_that_does_not_divide() -> None:
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, "intermediate_size": 50}))
    assert refused(module, 4) == ["model.layers.0.mlp.down_proj takes 50 inputs, which tp 4 does not divide; use tp 2"]


def test_a_norm_over_all_heads() -> None:
    module = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**GROUPED))
    assert refused(module) == [
        "model.layers.0.self_attn.q_proj cannot be sharded by columns: model.layers.0.self_attn.q_norm works over its "
        "full width (32), of which each of 2 ranks would have a part; use fsdp or pipeline parallel"
    ]


class _Stack(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Softmax(nn.Module):
    """A softmax over the whole inner width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).softmax(-1))


class _Shifted(_Softmax):
    """Each token sees the one before it, outside of what is cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.pad(x, (0, 0, 1, -1)) + self.down(functional.relu(self.up(x)))


class _Fixed(_Softmax):
    """A number of the cut width that no attribute holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).view(x.shape[0], -1, 6, 8).flatten(2))


class _Gated(_Softmax):
    """The block's input enters between columns and rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x) * x.mean(-1, keepdim=True))


def test_a_reduction_over_the_cut_width() -> None:
    (said,) = refused(_Stack(_Softmax))
    assert said.startswith(
        "blocks.0.up cannot be sharded by columns: what runs after it works over its full width (48)"
    )


def test_what_mixes_tokens_between_regions() -> None:
    (said,) = refused(_Stack(_Shifted))
    assert said.startswith("blocks.0 cannot run with its sequence sharded over tp 2 ranks: ")
    assert said.endswith("set parallel.sequence_parallel to false")
    assert layout(_Stack(_Shifted), sequence_parallel=False).styles["blocks.*.up"] == "colwise"


class _TwoStacks(_Stack):
    """What one block gives is worked on, as a whole, before the next one."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        return self.head(second(first(self.embed(ids)).cumsum(1)))


class _Plain(_Softmax):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.relu(self.up(x)))


def test_what_runs_between_blocks() -> None:
    assert layout(_Stack(_Plain)).first == "blocks.0"
    (said,) = refused(_TwoStacks(_Plain))
    assert said.startswith("blocks.1 is not given what the block before it gives: something else runs between them")
    assert layout(_TwoStacks(_Plain), sequence_parallel=False).styles["blocks.*.up"] == "colwise"


def test_a_number_that_nothing_can_change() -> None:
    (said,) = refused(_Stack(_Fixed))
    assert said.startswith("blocks.0 cannot be sharded over tp 2 ranks (up, down): ")
    assert "no change of its modules' integer attributes makes it correct" in said


def test_what_enters_a_region_by_another_way() -> None:
    (said,) = refused(_Stack(_Gated))
    assert "no block of the model has a linear layer whose results go to another one" in said
    styles = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    said = refused(_Stack(_Gated), styles=styles)[0]
    assert said.startswith("blocks.0.down reads the block's input besides sharded tensors, and its gradient would")


def test_a_model_without_blocks() -> None:
    (said,) = refused(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)))
    assert said.startswith("ddp+tp2: tensor parallel shards repeated blocks")


def test_a_model_that_does_not_run_on_token_ids() -> None:
    module = nn.Sequential(*(_Softmax() for _ in range(2)))
    (said,) = refused(module)
    assert said.startswith("ddp+tp2 traces one short forward of the model, which raised RuntimeError: ")
    assert said.endswith("session.prepare(model, optimizer, sample)")


def test_a_length_that_does_not_divide() -> None:
    expected = (
        "sequence parallel shards the sequence over tp 2 ranks, and its length 15 is not a multiple of 2; make it "
        "16 or set parallel.sequence_parallel to false"
    )
    assert refused(family("own", layers=2), sample=torch.zeros(2, 15, dtype=torch.int64)) == [expected]
    assert refused(family("own", layers=2), seq_len=15) == [expected]


def test_loss_parallel_without_a_vocabulary_to_cut() -> None:
    module = _Stack(_Shifted)
    module.head = nn.Linear(WIDTH, 10)
    (said,) = refused(module, loss_parallel=True, sequence_parallel=False)
    assert said.startswith(
        "ddp+tp2: loss_parallel shards the logits over the vocabulary, and the model's output is not"
    )


def test_loss_parallel_with_a_loss_inside_the_model() -> None:
    sample = {"input_ids": torch.zeros(1, 16).long(), "labels": torch.zeros(1, 16).long()}
    (said,) = refused(family("llama", layers=2), sample=sample, loss_parallel=True)
    assert "set parallel.loss_parallel to false" in said
    assert layout(family("llama", layers=2), sample=sample).logits is None


class _Probabilities(_Stack):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).log_softmax(-1)


def test_loss_parallel_with_logits_that_are_mixed() -> None:
    (said,) = refused(_Probabilities(_Shifted), loss_parallel=True, sequence_parallel=False)
    assert said.startswith(
        "the logits are mixed over the vocabulary after the head, which loss_parallel leaves sharded"
    )


def test_everything_at_once() -> None:
    kind = {**GROUPED, "hidden_size": 48, "num_attention_heads": 6}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kind))
    assert len(refused(module, 4, seq_len=15)) == 2


def test_chunks_are_those_of_torch() -> None:
    for size, ranks in itertools.product(range(1, 12), range(1, 6)):
        expected = [len(piece) for piece in torch.arange(size).chunk(ranks)]
        found = [chunk(size, ranks, rank) for rank in range(ranks)]
        assert [end - first for first, end in found] == expected + [0] * (ranks - len(expected))


class Helped(nn.Module):
    """Blocks that take something of the whole model's: a scale of queries, a factor of hidden states, or a penalty."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.factor = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList(HelpedBlock(how) for _ in range(2))
        if how == "activation":
            self.blocks[1].act = nn.Softmax(-1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> Any:
        x, penalty = self.tokens(ids), torch.zeros(())
        for index, block in enumerate(self.blocks):
            x, more = block(x, self.factor[index])
            penalty = penalty + more
        return (self.head(x), penalty) if self.how == "penalty" else self.head(x)


class HelpedBlock(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.act: nn.Module = nn.GELU()

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.how == "outside":
            x = x * factor
        inner = self.act(self.up(x))
        if self.how == "inside":
            inner = inner * factor
        return x + self.down(inner), inner.abs().mean()


def test_a_parameter_of_the_whole_model_inside_of_a_region_leaves_it_whole() -> None:
    full = refused(Helped("inside"), sequence_parallel=False)
    assert "nothing to shard" in full[0]


def test_a_parameter_of_the_whole_model_between_regions_needs_whole_sequences() -> None:
    assert not layout(Helped("outside"), sequence_parallel=False).notes
    (problem,) = refused(Helped("outside"))
    assert "'factor', which is a parameter outside of it" in problem and "sequence_parallel to false" in problem


@pytest.mark.parametrize("sequence", [True, False])
def test_a_penalty_that_blocks_work_out_is_refused(sequence: bool) -> None:
    problems = refused(Helped("penalty"), sequence_parallel=sequence)
    assert any("computed inside its blocks" in problem for problem in problems), problems


def test_blocks_that_differ_in_a_function_are_each_looked_at() -> None:
    assert layout(Helped("plain"))
    assert "blocks.1.up" in " ".join(refused(Helped("activation")))


def test_router_logits_are_refused() -> None:
    options = {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}
    for asked in (False, True):
        module = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options, output_router_logits=asked))
        if asked:
            assert any("computed inside its blocks" in problem for problem in refused(module))
        else:
            assert layout(module)
