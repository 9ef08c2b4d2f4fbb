"""What became of the data: documents, tokens with a loss by role, rows left out, what a sample's length cut off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.train.config import Config
from shardwise.train.data.corpus import Corpus
from shardwise.train.data.order import MixtureOrder, SampleOrder
from shardwise.train.data.packing import Truncation
from shardwise.train.data.samples import JoinedSources, NumberedSamples, order_for, samples_for
from shardwise.units import count_text, counted


@dataclass(frozen=True)
class DataReceipt:
    """The training side of a corpus as it will be trained on.

    ``roles`` are the tokens that samples predict and those of them with a loss, empty where all have one: what the
    length of a sample cuts off is in neither, so ``trained_share`` is that of an epoch's steps. ``fill`` is the share
    of inputs that are not padding (``None`` where samples are joined), ``truncation`` what ``data.seq_len`` costs;
    ``epoch`` are the samples of an epoch, ``sources`` the samples of each source of a mixture and its share of the
    stream; ``fingerprint`` is of the tokens, and resuming compares it.
    """

    kind: str
    packing: Literal["isolated", "joined", "none"]
    documents: int
    tokens: int
    heldout_tokens: int
    samples: int
    seq_len: int
    roles: dict[str, tuple[int, int]]
    left_out: int
    left_out_first: tuple[str, ...]
    truncation: Truncation | None
    fill: float | None
    epoch: int
    sources: dict[str, tuple[int, float]]
    fingerprint: str

    @property
    def trained_share(self) -> float:
        """Share of the tokens with a loss."""
        totals = [sum(numbers) for numbers in zip(*self.roles.values(), strict=True)]
        return totals[1] / totals[0] if totals else 1.0

    @property
    def noun(self) -> str:
        """What a row is; a mixture with plain text has documents."""
        nouns = {"messages": "conversation", "instruction": "instruction", "completion": "prompt"}
        return "document" if "text" in self.roles else nouns.get(self.kind, "document")

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self) | {"trained_share": self.trained_share}

    def lines(self) -> Iterator[str]:
        """Yield lines for people."""
        heldout = count_text(self.heldout_tokens) if self.heldout_tokens else "no"
        yield f"{count_text(self.tokens)} training tokens, {heldout} held-out tokens"
        if self.roles:
            of = ", ".join(
                f"{role} {trained / total:.0%} of {count_text(total)}" for role, (total, trained) in self.roles.items()
            )
            yield f"{counted(self.documents, self.noun)}; {self.trained_share:.1%} of the tokens have a loss: {of}"
        for name, (size, share) in self.sources.items():
            passes = self.epoch * share / size
            yield f"{name}: {share:.2%} of the stream, {counted(size, 'sample')}, {passes:.2f} × in an epoch"
        if self.left_out:
            yield f"{counted(self.left_out, 'row')} left out, such as {self.left_out_first[0]}"
        if self.truncation is not None and self.truncation.truncated:
            if self.roles:
                lost = self.truncation.tokens_lost
                labels = lost + sum(trained for _, trained in self.roles.values())
                yield (
                    f"{self.truncation.truncated} of {counted(self.truncation.documents, 'document')} cut at "
                    f"{self.seq_len} tokens, "
                    f"{self.truncation.lost} of them lost every label and are left out "
                    f"({count_text(lost)} of {count_text(labels)} tokens with a loss are cut off by data.seq_len)"
                )
            else:
                longer = counted(self.truncation.truncated, "document")
                yield f"{longer} longer than {self.seq_len} tokens go on in further pieces"
        if self.packing == "isolated":
            packed = self.documents - (self.truncation.lost if self.truncation is not None else 0)
            yield (
                f"packed, isolated: {counted(packed, 'document')} in {counted(self.samples, 'sample')} of "
                f"{self.seq_len} tokens, {self.fill or 0:.1%} filled; none sees another"
            )
        elif self.packing == "none":
            yield f"not packed: a document in each sample of {self.seq_len} tokens, {self.fill or 0:.1%} filled"


def _shares(corpus: Corpus, samples: NumberedSamples, order: SampleOrder) -> dict[str, tuple[int, float]]:
    """Return samples and share of the stream of each source of a mixture."""
    if not isinstance(samples, JoinedSources):
        return {}
    weights = order.counts if isinstance(order, MixtureOrder) else samples.sizes
    return {
        name: (size, weight / sum(weights))
        for name, size, weight in zip(corpus.sources, samples.sizes, weights, strict=True)
    }


def data_receipt(corpus: Corpus, config: Config) -> DataReceipt:
    """Describe the training side of ``corpus`` under ``config``.

    Raises:
        DataError: it has not a single label.
    """
    tokens, packing, seq_len = corpus.train, config.packing(corpus.kind), config.data.seq_len
    samples = samples_for(corpus, config)
    order = order_for(samples, config)
    shares = _shares(corpus, samples, order)
    return DataReceipt(
        kind=corpus.kind,
        packing=packing,
        documents=len(tokens.starts) - 1,
        tokens=len(tokens.tokens),
        heldout_tokens=0 if corpus.heldout is None else len(corpus.heldout.tokens),
        samples=len(samples),
        seq_len=seq_len,
        roles=samples.roles(),
        left_out=corpus.left_out,
        left_out_first=corpus.left_out_first,
        truncation=samples.truncation,
        fill=samples.fill,
        sources=shares,
        epoch=order.epoch,
        fingerprint=tokens.content,
    )
