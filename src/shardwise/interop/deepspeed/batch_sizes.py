"""DeepSpeed's batch equation: total batch = micro batch per GPU × accumulation × ranks."""

from __future__ import annotations

from shardwise.errors import PlanError

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def solve_batch(
    total: int | None, micro: int | None, steps: int | None, ranks: int | None
) -> tuple[tuple[int, int, int], str]:
    """Solve ``total = micro × steps × ranks`` as DeepSpeed does; also return the ranks' source.

    With only a total, or only a micro batch, there is no accumulation. DeepSpeed divides and drops the remainder, and
    then finds that the equation is violated; here a remainder is reported immediately.

    Raises:
        PlanError: it has no integer solution, contradicts itself, or is underdetermined.
    """
    names = dict(zip(("total", "micro", "steps", "ranks"), (*BATCH, "ranks"), strict=True))
    given = {"total": total, "micro": micro, "steps": steps, "ranks": ranks}
    if total is None and micro is None:
        raise PlanError(
            "train_batch_size and train_micro_batch_size_per_gpu are both missing; DeepSpeed needs one of them"
        )
    if ranks is None and None in (total, micro, steps):
        missing = ", ".join(names[key] for key, value in given.items() if value is None and key != "ranks")
        raise PlanError(f"the number of ranks is not known ({missing} is not in the file); give --nproc or --cluster")
    factors = {key: value for key, value in given.items() if value is not None and key != "total"}
    words = " × ".join(f"{names[key]} {value}" for key, value in factors.items())
    product = 1
    for value in factors.values():
        product *= value
    if total is not None and None not in (micro, steps, ranks) and product != total:
        fix = f"set train_batch_size to {product}"
        if micro and steps and total % (micro * steps) == 0:
            fix += f", or run on {total // (micro * steps)} ranks"
        raise PlanError(f"train_batch_size {total} is not {words} = {product}; {fix}")
    if total is not None and total % product:
        below, above = total // product * product, (total // product + 1) * product
        nearest = f"{below} or {above}" if below else str(above)
        equation = f"{words} = {product}" if len(factors) > 1 else words
        raise PlanError(f"train_batch_size {total} is not a multiple of {equation}; set it to {nearest}")
    if ranks is None:
        found = (total or 0) // product
        return (micro or 1, steps or 1, found), f"train_batch_size {total} ÷ ({micro} × {steps}) = {found} ranks"
    if total is None:
        return (micro or 1, steps or 1, ranks), "as asked for"
    if micro is None:
        return (total // product, steps or 1, ranks), "as asked for"
    return (micro, total // (micro * ranks), ranks), "as asked for"
