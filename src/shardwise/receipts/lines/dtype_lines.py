"""Receipt line on the compute dtype of products: the plan's casts, not the model's own."""

from __future__ import annotations

from collections.abc import Set

from shardwise.measure.collectives import CollectiveRecorder
from shardwise.receipts.receipt import Line


def compute_line(planned: Set[str], recorder: CollectiveRecorder, *, casts_weights: bool) -> Line:
    """Compare product dtypes with the plan.

    Others are the model's own, except of uncast weights.

    If the plan casts weights (``casts_weights``), a weight that is multiplied in another dtype without a copy was
    not cast. Autocast casts the operands of each product: it is on if any product has the planned dtype; elsewhere
    a part of the model has turned it off or casts afterwards (attention or a router in fp32 on purpose).
    """
    seen, wanted = recorder.matmul_dtypes, ", ".join(sorted(planned))
    own = seen - planned
    missed = recorder.weight_dtypes - planned if casts_weights else set()
    found = ", ".join(sorted(seen))
    if own and not missed and seen & planned:
        found = f"{', '.join(sorted(seen & planned))}; {', '.join(sorted(own))} where the model casts itself"
    return Line(name="compute dtype", planned=wanted, found=found, ok=bool(seen & planned) and not missed)
