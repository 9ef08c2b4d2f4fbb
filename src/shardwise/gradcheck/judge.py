"""Compare one step of a strategy with one process on every rank; explain it on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.gradcheck.batches import Batch, Key, Reference, contributions, tokens_of
from shardwise.gradcheck.causes import CauseContext, explain, explain_loss, explain_norm, explain_weights
from shardwise.gradcheck.compare import Difference, Gradients, GradientVerdict, compare, judge
from shardwise.gradcheck.reference import References
from shardwise.gradcheck.views import GradientRecorder, all_parts, error_table, full_weights
from shardwise.train.session import Session

CLIPPED = 0.5  # of the norm: the clipping threshold


@dataclass(frozen=True)
class Judged:
    """Verdict, and on rank 0 its explanation where it is negative."""

    verdict: GradientVerdict
    reasons: tuple[str, ...] = ()


class Judge:
    """Compare a prepared session with one process's model. Every method is collective.

    Args:
        make: the small model with the weights that rank 0 has.
        session: prepared.
        references: gradients of one process.
        heads: key-value heads of the model and their size; 0 where not known.
    """

    def __init__(
        self, make: Callable[[], nn.Module], session: Session, references: References, heads: tuple[int, int]
    ) -> None:
        self.make, self.session, self.references = make, session, references
        self.setting = CauseContext(session.plan, *heads)

    def weights(self) -> tuple[str, ...]:
        """Check every rank's weights against the model's; return those in the wrong place."""
        expected = {name: p.detach() for name, p in self.make().named_parameters()}
        parts, worst = self._seen(expected, full_weights(self.session.module), 0.0)
        if max(float(row.max()) for row in worst) <= 0.0 or not self.session.ranks.is_main:
            return ()
        found = self._furthest(expected, parts, worst)
        return explain_weights(expected, found, compare(expected, found), self.setting)

    def step(
        self, recorder: GradientRecorder, expected: Reference, batches: Mapping[Key, Batch], *, norm: float, loss: float
    ) -> Judged:
        """Compare the gradients before and after clipping, the norm and the loss of a step."""
        names, tolerance = list(expected.gradients), self.references.tolerance
        scale = min(1.0, CLIPPED * expected.norm / (expected.norm + 1e-6))
        scaled = {n: None if g is None else g * scale for n, g in expected.gradients.items()}
        clipped = max((d.error for d in compare(scaled, recorder.clipped)), default=0.0)
        table = error_table(names, compare(expected.gradients, recorder.raw), clipped, self.session.ranks)
        errors = [max(float(row[i]) for row in table) for i in range(len(names))]
        merged = [
            Difference(name=name, error=float("inf") if error < 0 else error, missing=error < 0)  # on no rank
            for name, error in zip(names, errors, strict=True)
        ]
        worst_clipped = max(float(row[-1]) for row in table)
        verdict = judge(
            merged,
            norm=(norm, expected.norm),
            loss=(loss, expected.loss),
            clipped_error=worst_clipped,
            tolerance=tolerance,
        )
        if verdict.ok:
            return Judged(verdict)
        parts = all_parts(names, recorder.raw, self.session.ranks)
        if not self.session.ranks.is_main:
            return Judged(verdict)
        found = self._furthest(expected.gradients, parts, table)
        differences = compare(expected.gradients, found)
        verdict = judge(
            differences,
            norm=(norm, expected.norm),
            loss=(loss, expected.loss),
            clipped_error=worst_clipped,
            tolerance=tolerance,
        )
        return Judged(verdict, self._explained(verdict, expected, found, differences, parts, batches, norm, loss))

    def _explained(
        self,
        verdict: GradientVerdict,
        expected: Reference,
        found: Gradients,
        differences: list[Difference],
        parts: list[Gradients],
        batches: Mapping[Key, Batch],
        norm: float,
        loss: float,
    ) -> tuple[str, ...]:
        reasons: tuple[str, ...] = ()
        if verdict.loss_error > verdict.tolerance:
            reasons = (explain_loss(loss, expected.loss, self.session.plan),)
        if verdict.differing:
            return reasons + explain(
                expected.gradients,
                found,
                differences,
                self.setting,
                tolerance=verdict.tolerance,
                parts=parts,
                contributions=contributions(self.make, batches),
                tokens=tokens_of(batches),
                brief=bool(reasons),
            )
        return reasons or (explain_norm(norm, expected.norm, self.session.plan),)

    def _seen(self, expected: Gradients, mine: Gradients, extra: float) -> tuple[list[Gradients], list[torch.Tensor]]:
        names = list(expected)
        table = error_table(names, compare(expected, mine), extra, self.session.ranks)
        if max(float(row.max()) for row in table) <= 0.0:
            return [], table
        return all_parts(names, mine, self.session.ranks), table

    @staticmethod
    def _furthest(expected: Gradients, parts: list[Gradients], table: list[torch.Tensor]) -> Gradients:
        """Return for each parameter the view of the rank with the largest error."""
        worst = torch.stack(table).max(0).indices.tolist()
        return {name: parts[worst[i]].get(name) for i, name in enumerate(expected)}
