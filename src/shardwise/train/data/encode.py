"""Documents to ids and marks, in this process or in several."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.environment import one_tokenizer_thread
from shardwise.train.data.chat import ROLES, ChatTemplate, LossOn, Rendered, marks, prompt_and_completion
from shardwise.train.data.documents import Document, Kind, RowProblem
from shardwise.train.data.sources import Batch
from shardwise.train.data.tokenizer import Tokenizer, load_tokenizer, utf8

_WORTH_WORKERS = 8 << 20  # bytes of files: less is tokenised before a worker has imported its libraries
_WAITING = 4  # batches of a worker
_SEPARATOR = {"text": 2 * ROLES.index("text") + 1, "completion": 2 * ROLES.index("assistant") + 1}


@dataclass(frozen=True)
class Encoded:
    """A document: ids, the mark of each token (empty where all have a loss), and its bytes in UTF-8."""

    ids: NDArray[Any]
    marks: bytes
    num_bytes: int


@dataclass(frozen=True)
class Encoder:
    """How documents of one kind become tokens; the names are those of the config.

    ``date`` is today for a template that writes it. ``beside_marked``: other sources of the mixture leave tokens out of
    the loss, so that all need marks.
    """

    tokenizer_name: str
    kind: Kind
    chat_template: str | None
    loss_on: LossOn | Literal["auto"]
    beside_marked: bool = False
    date: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The loaded tokenizer."""
        return load_tokenizer(self.tokenizer_name)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template."""
        return replace(self.tokenizer.template(self.chat_template), date=self.date)

    @property
    def marked(self) -> bool:
        """True if the loss leaves tokens out."""
        return self.kind != "text" or self.beside_marked

    def parts_of_end(self) -> int:
        """Return how many tokens ChatML's end of a turn is; 1 where the template does not use it, or for ``bytes``."""
        if self.kind in ("text", "completion") or self.tokenizer_name == "bytes":
            return 1
        if "<|im_end|>" not in self.template.template:
            return 1
        return len(next(iter(self.tokenizer.encode(["<|im_end|>"]))))

    def end_of_answers(self) -> int | None:
        """Return the token at which an answer ends; ``None`` where it is several, or the template writes none."""
        if self.kind in ("text", "completion"):
            return self.tokenizer.separator
        turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        found = self.encode([Document("", messages=turns, trained_from=1)])[0]
        trained = [] if isinstance(found, str) else found.ids[np.frombuffer(found.marks, np.uint8) & 1 == 1]
        if not len(trained) or self.tokenizer.decode(np.asarray(trained[-1:])) not in self.template.ends:
            return None
        return int(trained[-1])

    @property
    def loss(self) -> LossOn:
        """The parts of a conversation with a loss."""
        if self.loss_on != "auto":
            return self.loss_on
        return "assistant" if self.kind == "messages" else "completion"

    def render(self, document: Document) -> Rendered:
        """Return a conversation, or a prompt with its completion, as text.

        Raises:
            RowProblem: the template refuses it.
        """
        if document.messages:
            return self.template.document(document, self.loss)
        return prompt_and_completion(document, self.loss)

    def encode(self, documents: list[Document]) -> list[Encoded | str]:
        """Encode documents; a problem is its text."""
        tokenizer = self.tokenizer
        if self.kind == "text":
            texts = [one.text or "" for one in documents]
            ended = [self._ended(ids) for ids in tokenizer.encode(texts)] if texts else []
            mark = bytes([_SEPARATOR["text"]]) if self.marked else b""
            return [Encoded(ids, mark * len(ids), len(utf8(text))) for text, ids in zip(texts, ended, strict=True)]
        found: list[Encoded | str | Rendered] = []
        for document in documents:
            try:
                found.append(self.render(document))
            except RowProblem as problem:
                found.append(str(problem))
        rendered = [(i, one) for i, one in enumerate(found) if isinstance(one, Rendered)]
        texts = [one.text for _, one in rendered]
        coded = tokenizer.encode_with_offsets(texts) if texts else []
        for (index, one), (ids, offsets) in zip(rendered, coded, strict=True):
            found[index] = self._marked(documents[index], one, ids, marks(one, offsets))
        return found  # type: ignore[return-value]  # nothing is only rendered any more

    def _ended(self, ids: Any) -> NDArray[Any]:
        tokens = np.empty(len(ids) + 1, np.uint32)
        tokens[:-1], tokens[-1] = ids, self.tokenizer.separator
        return tokens

    def _marked(self, document: Document, rendered: Rendered, ids: Any, found: bytearray) -> Encoded:
        size = len(utf8(rendered.text))
        if document.messages:
            return Encoded(np.asarray(ids, np.uint32), bytes(found), size)
        return Encoded(self._ended(ids), bytes(found) + bytes([_SEPARATOR["completion"]]), size)


_ENCODERS: list[Encoder] = []  # of a worker: its one


def _begin(encoder: Encoder) -> None:
    one_tokenizer_thread()
    _ENCODERS.append(encoder)


def _work(documents: list[Document]) -> list[Encoded | str]:
    return _ENCODERS[0].encode(documents)


def encoded_batches(
    encoder: Encoder, batches: Iterable[Batch], num_bytes: int
) -> Iterator[tuple[Batch, list[Encoded | str]]]:
    """Yield batches with what became of their documents, in order.

    Several processes encode what is more than 8 MiB of files, a few batches ahead of the caller.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (
        workers == 1 or num_bytes < _WORTH_WORKERS or encoder.kind == "text"
    ):  # libraries of tokens use all cores themselves
        for batch in batches:
            yield batch, encoder.encode(batch.documents)
        return
    with ExitStack() as stack:
        pool = stack.enter_context(
            ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=(replace(encoder),))
        )
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting: deque[tuple[Batch, Any]] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(_work, batch.documents)))
            if len(waiting) > _WAITING * workers:
                first, found = waiting.popleft()
                yield first, found.result()
        for first, found in waiting:
            yield first, found.result()
