"""Receipts of other tools' loops on two ranks: transformers' Trainer, TRL, Accelerate, Lightning's Fabric."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import shardwise
from shardwise.receipts.receipt import Receipt
from tests.models import VOCAB, decoder
from tests.world.test_observe import Lines, batches, clip, loss_of, sharded, train, wrong
from tests.worlds import run_each


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes, **options)
    return LlamaForCausalLM(config)


def rows(number: int = 64) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(64, (number, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(kind: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    usual = {"per_device_train_batch_size": 2, "max_steps": 3, "report_to": [], "save_strategy": "no"}
    quiet = {"disable_tqdm": True, "logging_strategy": "no", "use_cpu": True, "output_dir": tempfile.mkdtemp()}
    return (kind or TrainingArguments)(**{**usual, **quiet, **options})


def fresh() -> None:
    """Accelerate keeps its state for the life of a process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state.clear()


def of_trainer(options: dict[str, Any], model_options: dict[str, Any] | None = None) -> tuple[Lines, int]:
    from transformers import Trainer

    from shardwise.integrations.transformers import ReceiptCallback

    fresh()
    callback = ReceiptCallback(on_receipt=lambda _: None)
    model = llama(**(model_options or {}))
    Trainer(model=model, args=arguments(**options), train_dataset=rows(), callbacks=[callback]).train()
    assert callback.receipt is not None
    return wrong(callback.receipt), judged(callback.receipt)


def judged(receipt: Receipt) -> int:
    return sum(line.ok is True for line in receipt.lines)


TRAINER: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1},
    {"bf16": True},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"optim": "adafactor", "warmup_steps": 2, "lr_scheduler_type": "cosine"},
    {"num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 10},
]
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
FSDP_LINES = {"wrapper", "parameters", "optimizer state"}


def ends_the_training() -> tuple[Lines, int]:
    from transformers import Trainer

    from shardwise.integrations.transformers import ReceiptCallback

    fresh()
    callback = ReceiptCallback("error", on_receipt=lambda _: None)
    trainer = Trainer(model=llama(), args=arguments(**FSDP), train_dataset=rows(), callbacks=[callback])
    with pytest.raises(shardwise.ShardwiseError, match="wrapper: planned FSDP2, found DDP"):
        trainer.train()
    assert callback.receipt is not None
    return wrong(callback.receipt), trainer.state.global_step


def trainer_case(number: int) -> tuple[Lines, int]:
    more = [({}, {"tie_word_embeddings": True}), ({}, {"attention_dropout": 0.1}), (FSDP, {})]
    cases = [*((options, {}) for options in TRAINER), *more]
    return ends_the_training() if number == len(cases) else of_trainer(*cases[number])


def test_trainer() -> None:
    """Silent on what it was asked for; FSDP on CPUs, where it runs DDP without a word, is named."""
    found = run_each(trainer_case, 2, [(number,) for number in range(len(TRAINER) + 4)], timeout_s=170)
    assert all(first == second for first, second in found)
    *clean, fault, ended = [first for first, _ in found]
    assert [lines for lines, _ in clean] == [{}] * len(clean)
    assert all(number >= 10 for _, number in clean)
    assert fault[0].keys() == FSDP_LINES
    assert fault[0]["wrapper"] == "planned FSDP2, found DDP"
    assert (ended[0].keys(), ended[1]) == (FSDP_LINES, 2)


def of_sft(options: dict[str, Any]) -> tuple[Lines, int]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from shardwise.integrations.transformers import ReceiptCallback

    fresh()
    callback = ReceiptCallback(on_receipt=lambda _: None)
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    config = arguments(SFTConfig, **{"bf16": False, "gradient_checkpointing": False, **options})
    tokenizer = word_tokenizer()
    SFTTrainer(model=llama(), args=config, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    assert callback.receipt is not None
    return wrong(callback.receipt), judged(callback.receipt)


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w2", unk_token="w0")


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_sft_trainer() -> None:
    clean, fault = run_each(of_sft, 2, [({},), (FSDP,)], timeout_s=170)
    assert not clean[0][0]
    assert clean[0][1] >= 10
    assert fault[0][0].keys() == FSDP_LINES


def of_accelerate(options: dict[str, Any], *, short_epochs: bool = False) -> tuple[Lines, int]:
    from accelerate import Accelerator

    from shardwise.integrations.accelerate import observe

    fresh()
    accelerator = Accelerator(cpu=True, **options)
    model = decoder().float()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found: list[Receipt] = []
    accum = accelerator.gradient_accumulation_steps
    data: Any = list(batches(3 * accum))
    if short_epochs:  # the second step of each has one micro batch
        loader = accelerator.prepare(torch.utils.data.DataLoader(range((accum + 1) * 2)))
        pairs = batches(2 * (accum + 1))
        data = (next(pairs) for _ in range(2) for _ in loader)
    with observe(accelerator, on_receipt=found.append) as observer:
        for inputs, labels in data:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(inputs), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    assert observer.receipt is not None
    return wrong(observer.receipt), judged(observer.receipt)


def of_accelerate_fsdp2(*, offload: bool) -> tuple[Lines, int]:
    """Accelerate's own FSDP2, which it leaves out on CPUs unless its state says that they shard."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    fresh()
    wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrapped)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    model = decoder().float()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if offload:  # asked for after it was left out
        plugin.cpu_offload = CPUOffloadPolicy()
    clips = {"before_step": lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1), "clip_norm": 0.1}
    receipt = train(model, optimizer, accelerator, backward=accelerator.backward, **clips)
    return wrong(receipt), judged(receipt)


SHORT = 6


def accelerate_case(number: int) -> tuple[Lines, int]:
    from accelerate import FullyShardedDataParallelPlugin

    asked = [{}, {"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}]
    if number < len(asked):
        return of_accelerate(asked[number])
    if number == SHORT:
        return of_accelerate({"gradient_accumulation_steps": 3}, short_epochs=True)
    if number == len(asked):
        return of_accelerate({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)})
    return of_accelerate_fsdp2(offload=number > len(asked) + 1)


def test_accelerate() -> None:
    found = run_each(accelerate_case, 2, [(number,) for number in range(SHORT + 1)], timeout_s=170)
    assert all(first == second for first, second in found)
    ddp, accumulating, bf16, forgotten, fsdp2, offload, short = [first for first, _ in found]
    for lines, number in (ddp, accumulating, bf16, fsdp2, short):
        assert not lines
        assert number >= 10
    assert forgotten[0].keys() == FSDP_LINES
    assert offload[0].keys() == {"offload"}


def elastic() -> Any:
    """Lightning's view of a world of ranks that exists already."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    os.environ.update(TORCHELASTIC_RUN_ID="none", GROUP_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29511")
    return TorchElasticEnvironment()


def of_fabric(expect: str) -> tuple[Lines, int]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from shardwise.integrations.fabric import observe

    def shard(model: Any, mesh: Any) -> Any:
        return sharded(model, mesh=mesh["data_parallel"])

    strategy: Any = expect
    if expect == "fsdp":
        strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[elastic()])
    fabric.launch()
    model = fabric.setup(decoder().float())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    stated = None if expect == "ddp" else expect  # a ModelParallelStrategy does not say what its function shards
    own = functools.partial(observe, fabric)
    receipt = train(model, optimizer, stated, backward=fabric.backward, before_step=clip(model), observe=own)
    return wrong(receipt), judged(receipt)


def of_lightning(expect: str, *, scheduled: bool = False) -> tuple[Lines, int]:
    """Lightning's Trainer runs forward and backward in a closure of the optimizer's step.

    ``scheduled``: a callback sets the accumulation when the epoch begins.
    """
    import lightning

    from shardwise.integrations.lightning import LightningReceiptCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = decoder().float()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return loss_of(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    callback = LightningReceiptCallback(expect=None if expect == "ddp" else expect, on_receipt=lambda _: None)
    ids = torch.randint(VOCAB, (64, 8), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(ids[:, :-1], ids[:, 1:])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options: dict[str, Any] = {"max_steps": 3, "gradient_clip_val": 0.1, "strategy": "ddp"}
    callbacks: list[lightning.Callback] = [callback]
    if scheduled:
        callbacks.append(lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 2}))
    else:
        options["accumulate_grad_batches"] = 2
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, callbacks=callbacks, plugins=[elastic()], **quiet, **options
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
    assert callback.receipt is not None
    return wrong(callback.receipt), judged(callback.receipt)


def of_lightning_tools(kind: str, expect: str) -> tuple[Lines, int]:
    return of_fabric(expect) if kind == "fabric" else of_lightning(expect, scheduled=kind == "scheduled")


def test_lightning_and_fabric() -> None:
    cases = [("fabric", "ddp"), ("fabric", "fsdp"), ("trainer", "ddp"), ("scheduled", "ddp"), ("trainer", "fsdp")]
    *clean, fault = run_each(of_lightning_tools, 2, cases, timeout_s=170)
    for ranks in clean:
        assert ranks[0] == ranks[1]
        assert not ranks[0][0]
        assert ranks[0][1] >= 10
    assert fault[0][0].keys() == FSDP_LINES


def of_deepspeed(stage: int, accum: int, expect: str) -> tuple[Lines, int]:
    from shardwise.parallel.engines.deepspeed_available import import_deepspeed

    model = decoder().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accum,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.1,
    }
    engine, optimizer, *_ = import_deepspeed().initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    found: list[Receipt] = []
    with shardwise.observe(engine, optimizer, expect, grad_accum=accum, on_receipt=found.append) as observer:
        for inputs, labels in batches(3 * accum):
            engine.backward(loss_of(engine(inputs), labels))
            engine.step()
    assert observer.receipt is not None
    assert "step" not in vars(engine.optimizer)
    return wrong(observer.receipt), judged(observer.receipt)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed() -> None:
    clean = [(0, 1, "ddp"), (1, 2, "deepspeed-zero1"), (2, 1, "deepspeed-zero2"), (3, 2, "deepspeed-zero3")]
    found = run_each(of_deepspeed, 2, [*clean, (1, 1, "deepspeed-zero3")], timeout_s=170)
    assert all(first == second for first, second in found)
    *right, fault = [first for first, _ in found]
    assert [lines for lines, _ in right] == [{}] * len(clean)
    assert all(number >= 7 for _, number in right)
    assert fault[0].keys() == {"wrapper", "parameters"}
