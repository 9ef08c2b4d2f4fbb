"""Find stacked experts in traced units: parameters that a grouped product reads, and what lies beside them."""

from __future__ import annotations

from dataclasses import replace

from shardwise.model.profile import Op, Unit, Weight

GROUPED = {"_grouped_mm", "grouped_mm_fallback"}  # aten's, and transformers' own for types that aten's cannot take


def mark_experts(unit: Unit) -> Unit:
    """Mark the weights of experts, and the operations between the first and the last of their products.

    Biases of experts are parameters of the same module with as many rows. Operations between the products work on the
    copies of tokens, too. A token uses as many experts as there are copies of it.
    """
    products = [index for index, op in enumerate(unit.ops) if op.experts]
    if not products:
        return unit
    first = unit.ops[products[0]]
    router = next((op.m for op in unit.ops if op.kind == "matmul" and op.n == first.experts and not op.experts), 0)
    tokens = router or unit.input_elements / max(1, first.k)
    active = min(1.0, first.m / tokens / first.experts) if tokens else 1.0
    names = {unit.ops[index].name for index in products}
    modules = {name.rpartition(".")[0] for name in names}

    def marked(weight: Weight) -> Weight:
        module = weight.name.removesuffix(".weight").rpartition(".")[0]
        routed = bool(weight.shape) and weight.shape[0] == first.experts and module in modules
        return replace(weight, experts=first.experts, active=active) if routed else weight

    def between(index: int, op: Op) -> Op:
        routed = products[0] <= index <= products[-1]
        return replace(op, experts=first.experts, share=active) if routed else op

    ops = tuple(between(index, op) for index, op in enumerate(unit.ops))
    return replace(unit, weights=tuple(map(marked, unit.weights)), ops=ops)
