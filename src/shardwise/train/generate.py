"""Text that the model writes at evaluations: greedy, by full forwards, on the ranks that train it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.parallel.data_parallel.fsdp import reshard
from shardwise.train.config import Config
from shardwise.train.data.documents import Kind, RowProblem
from shardwise.train.data.encode import Encoder
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.train.loss import full_logits
from shardwise.train.session import Session


class Generator:
    """Continues the prompts of ``train.generate``.

    Conversations are rendered by the chat template, as a user's question, on the ``date`` that the training data was
    prepared with; plain prompts are taken as they are. Every
    rank computes the same, so a model may be sharded in any way but over the sequence (+cp).

    Raises:
        ConfigError: a prompt is empty, or does not leave room in ``data.seq_len``.
        DataError: the tokenizer cannot be read.
    """

    def __init__(self, config: Config, kind: str, date: str | None = None) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(config.data.tokenizer)
        self.prompts, self.most = config.train.generate, config.train.generate_tokens
        self.date = date or config.data.date
        texts = [self._rendered(prompt, config, kind) for prompt in self.prompts]
        self.ids = [[int(one) for one in ids] for ids in self.tokenizer.encode(texts)]
        longest = max(map(len, self.ids)) + self.most
        problems = [
            f"train.generate {prompt!r:.60} is empty; remove it"
            for prompt, ids in zip(self.prompts, self.ids, strict=True)
            if not ids
        ]
        if longest > config.data.seq_len:
            problems.append(
                f"train.generate: the longest prompt and train.generate_tokens {self.most} are {longest} tokens, and "
                f"data.seq_len is {config.data.seq_len}; shorten one of them"
            )
        if problems:
            raise ConfigError(*problems)
        answer = Encoder(config.data.tokenizer, cast(Kind, kind), config.data.chat_template, "auto").end_of_answers()
        self.ends = [self.tokenizer.separator, *([] if answer is None else [answer])]
        self.length = min(-(-longest // 64) * 64, config.data.seq_len)  # a multiple of any degree of tensor parallel

    def _rendered(self, prompt: str, config: Config, kind: str) -> str:
        if kind not in ("messages", "instruction"):
            return prompt
        template = replace(self.tokenizer.template(config.data.chat_template), date=self.date)
        try:
            return template.render([{"role": "user", "content": prompt}], prompt=True)
        except RowProblem as problem:
            raise ConfigError(f"train.generate {prompt!r:.60}: {problem}") from None

    def texts(self, session: Session) -> list[str]:
        """Return a continuation of each prompt, up to the token that ends a document or an answer. Collective."""
        device, separator = session.device, self.tokenizer.separator
        rows = torch.full((len(self.ids), self.length), separator, dtype=torch.int64, device=device)
        ends = torch.tensor([len(ids) for ids in self.ids], device=device)
        for row, ids in enumerate(self.ids):
            rows[row, : len(ids)] = torch.tensor(ids, device=device)
        module, every = session.module, torch.arange(len(self.ids), device=device)
        was_training = module.training
        module.eval()
        with torch.no_grad():
            for done in range(self.most):  # every forward has the same shape, so that compiled blocks stay compiled
                rows[every, ends + done] = self._next(session, rows, ends + done - 1)
        module.train(was_training)
        reshard(module)
        return [self._text(rows[row, len(ids) :]) for row, ids in enumerate(self.ids)]

    def _next(self, session: Session, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the likeliest next token of each row."""
        pipeline = session.applied.pipeline
        every = torch.arange(len(rows), device=rows.device)
        if pipeline is None:
            return full_logits(session.module(rows))[every, at].argmax(-1)
        found = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)

        def look(outputs: Any, labels: Any) -> torch.Tensor:
            found.copy_(full_logits(outputs)[every, at].argmax(-1))
            return torch.zeros((), device=rows.device)

        pipeline.evaluate([rows], [rows], look)
        dist.all_reduce(found, dist.ReduceOp.MAX)  # zeros on the stages without the head
        return found

    def _text(self, ids: torch.Tensor) -> str:
        made = ids.cpu().numpy()
        ends = np.flatnonzero(np.isin(made, self.ends))
        return self.tokenizer.decode(made[: int(ends[0])] if len(ends) else made)
