"""Gradients of Trainer and SFTTrainer on two ranks: ``num_items_in_batch``, and what goes past it."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import VOCAB, decoder
from tests.world.test_observe_tools import arguments, elastic, fresh, llama, rows, word_tokenizer
from tests.worlds import run_each


def ragged() -> list[dict[str, torch.Tensor]]:
    """Rows of one length that count different numbers of labels."""
    made = rows()
    for number, row in enumerate(made):
        row["labels"] = row["labels"].clone()
        row["labels"][2 + number % 5 :] = -100
    return made


def without_loss_kwargs() -> nn.Module:
    """A model whose forward takes no ``num_items_in_batch``, as many a custom one."""
    from transformers import LlamaForCausalLM

    class Older(LlamaForCausalLM):
        accepts_loss_kwargs = False

        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    return Older(llama().config)


def own_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss that ignores the number of items, which the Trainer takes for normalised."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradient_lines(report: Any) -> tuple[str, list[str]]:
    text = next(line.found for line in report.lines if line.name == "gradient")
    return text, [line.found for line in report.lines if line.ok is False]


def of_trainer(case: str) -> tuple[str, list[str]]:
    from transformers import Trainer

    from shardwise.integrations.transformers import check_gradients

    fresh()
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}
    model: Any = without_loss_kwargs() if case == "mean of means" else llama()
    if case == "own tokens":
        options["average_tokens_across_devices"] = False
    more = {"compute_loss_func": own_mean} if case == "own loss" else {}
    trainer = Trainer(model=model, args=arguments(**options), train_dataset=ragged(), **more)
    check = check_gradients(trainer, step=2, on_report=lambda _: None)
    trainer.train()
    assert check.report is not None
    assert "compute_loss" not in trainer.__dict__
    return gradient_lines(check.report)


CASES = {
    "right": "",
    "own tokens": "each rank divides by its own tokens",
    "mean of means": "a mean of means",
    "own loss": "micro batch is averaged over its own tokens",
}


def test_trainer() -> None:
    found = run_each(of_trainer, 2, [(case,) for case in CASES], timeout_s=170)
    for (case, cause), (first, second) in zip(CASES.items(), found, strict=True):
        assert first == second, case
        text, wrong = first
        assert ("right" in text and not wrong) if not cause else any(cause in line for line in wrong), (
            f"{case}: {first}"
        )


def of_lightning(accum: int, clip: float | None) -> tuple[str, list[str]]:
    import lightning

    from shardwise.integrations.lightning import LightningGradientCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = decoder()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    ids = torch.randint(VOCAB, (32, 8), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    if accum > 1:
        for number, row in enumerate(labels):
            row[1 + number % 6 :] = -100
    data = torch.utils.data.TensorDataset(ids[:, :-1], labels)
    callback = LightningGradientCallback(step=2, on_report=lambda _: None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_steps": 3, "accumulate_grad_batches": accum, "gradient_clip_val": clip, "strategy": "ddp"}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, callbacks=[callback], plugins=[elastic()], **quiet, **options
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    assert callback.report is not None
    assert "training_step" not in vars(module)
    return gradient_lines(callback.report)


def test_lightning() -> None:
    """Its loss is a mean of means where micro batches count different numbers of labels."""
    (right, _), (ragged, _) = run_each(of_lightning, 2, [(1, 0.1), (2, None)], timeout_s=170)
    assert "right" in right[0], right
    assert any("a mean of means" in line for line in ragged[1]), ragged


def of_sft() -> tuple[str, list[str]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from shardwise.integrations.transformers import check_gradients

    fresh()
    data = Dataset.from_list([{"input_ids": row["input_ids"][: 4 + n % 5].tolist()} for n, row in enumerate(rows())])
    config = arguments(SFTConfig, bf16=False, gradient_checkpointing=False, gradient_accumulation_steps=2)
    trainer = SFTTrainer(model=llama(), args=config, train_dataset=data, processing_class=word_tokenizer())
    check = check_gradients(trainer, on_report=lambda _: None)
    trainer.train()
    assert check.report is not None
    return gradient_lines(check.report)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_sft_trainer() -> None:
    ((first, second),) = run_each(of_sft, 2, [()], timeout_s=170)
    assert first == second
    assert "right" in first[0], first
