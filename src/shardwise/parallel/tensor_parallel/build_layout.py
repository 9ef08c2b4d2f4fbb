"""Build a `TensorLayout` from the findings on a model's blocks, its head and its embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.model.facts import ModelSpec
from shardwise.model.flow import Flow, Product
from shardwise.parallel.tensor_parallel.regions import Regions
from shardwise.parallel.tensor_parallel.styles import starred
from shardwise.parallel.tensor_parallel.tensor_layout import (
    ArgRef,
    GatheredArgument,
    ModuleShard,
    ParameterView,
    Slices,
    TensorLayout,
    chunk,
)
from shardwise.plan.plan import Plan


@dataclass(frozen=True)
class VocabHead:
    """Last linear layer, embeddings sharded like it, and the sharded logits (``None``: full)."""

    product: Product
    place: str | int | None
    lookups: tuple[str, ...]


@dataclass(frozen=True)
class Findings:
    """Findings on a model: its blocks, and for each module those whose parameters it uses."""

    blocks: dict[str, Regions]
    head: VocabHead | None
    external_params: dict[str, tuple[str, ...]]
    hidden: ArgRef
    notes: tuple[str, ...]


def build(flow: Flow, spec: ModelSpec, plan: Plan, findings: Findings) -> TensorLayout:
    """Build the layout from all findings."""
    tp, sequence = plan.dims.tp, plan.sequence_parallel
    maker = _Maker(flow, spec, tp, sequence=sequence)
    for block, found in findings.blocks.items():
        maker.block(block, found)
    if findings.head is not None:
        maker.head(findings.head)
    shard_dim = maker.finish()
    blocks = list(findings.blocks)
    return TensorLayout(
        shard_dim=shard_dim,
        notes=findings.notes,
        styles=_styles(maker.modules, spec),
        modules=maker.modules,
        entries=maker.entries,
        attributes={
            f"{block}.{name}".rstrip("."): changed
            for block, found in findings.blocks.items()
            for name, changed in found.attributes.items()
        },
        external_params=findings.external_params,
        first=blocks[0] if sequence else "",
        last=blocks[-1] if sequence else "",
        hidden=findings.hidden,
        logits=findings.head.place if findings.head is not None else None,
        vocab=findings.head.product.outputs if findings.head is not None else 0,
    )


class _Maker:
    """Collect the modules' forwards and the placement of each parameter."""

    def __init__(self, flow: Flow, spec: ModelSpec, tp: int, *, sequence: bool) -> None:
        self.spec, self.tp, self.sequence = spec, tp, sequence
        self.canonical = {alias: p.name for p in spec.parameters for alias in (p.name, *p.aliases)}
        self.shapes = {p.name: p.shape for p in spec.parameters}
        self.products = {product.name: product for product in flow.products.values()}
        self.modules: dict[str, ModuleShard] = {}
        self.entries: dict[str, tuple[GatheredArgument, ...]] = {}

    def block(self, block: str, found: Regions) -> None:
        """Add the linear layers of a block, and the parameters that are read between them."""
        gathered = {group for _, group in found.entries.values()}
        for name, uses in found.columns.items():
            product = self.products[f"{block}.{name}"]
            local = {"weight": self._columns(product.weight, uses, 0 if product.outputs_first else 1)}
            if product.bias is not None:
                local["bias"] = self._columns(product.bias, uses, 0)
            group = found.groups[name]
            way = "" if group in gathered else f"block:{block}:{group}"
            self.modules[product.name] = ModuleShard("colwise", local, way)
        for name in found.rows:
            product = self.products[f"{block}.{name}"]
            local = {"weight": ParameterView(dim=1 if product.outputs_first else 0)}
            if product.bias is not None:
                local["bias"] = ParameterView(partial=self.sequence)
            self.modules[product.name] = ModuleShard("rowwise", local)
        for name, shard in found.inside.items():
            parent, _, key = f"{block}.{name}".rpartition(".")
            one = ParameterView(partial=True) if shard is None else self._columns(f"{block}.{name}", shard[1], shard[0])
            self.modules.setdefault(parent, ModuleShard("reads")).local[key] = one
        for name, (place, group) in found.entries.items():
            self.entries[f"{block}.{name}"] = (GatheredArgument(place, f"block:{block}:{group}"),)

    def head(self, head: VocabHead) -> None:
        """Add the head and its embeddings, sharded over the vocabulary."""
        product = head.product
        local = {"weight": ParameterView(dim=0 if product.outputs_first else 1)}
        if product.bias is not None:
            local["bias"] = ParameterView(dim=0)
        kind = ModuleShard("colwise_gather" if head.place is None else "colwise_loss", local, "head")
        self.modules[product.name] = kind
        for name in head.lookups:
            self.modules[name] = ModuleShard("embedding", {"weight": ParameterView(dim=0)})

    def finish(self) -> dict[str, int]:
        """Add all other parameters; return the shard dims of those that are sharded."""
        dims = {
            self.canonical[f"{name}.{key}"]: local.dim
            for name, shard in self.modules.items()
            for key, local in shard.local.items()
            if local.dim is not None
        }
        for parameter in self.spec.parameters:
            partial = self.sequence and parameter.block is not None
            for name in (parameter.name, *parameter.aliases):
                parent, _, key = name.rpartition(".")
                shard = self.modules.setdefault(parent, ModuleShard("reads"))
                shard.local.setdefault(key, ParameterView(dim=dims.get(parameter.name), partial=partial))
        return dims

    def _columns(self, name: str, uses: tuple[Slices, ...], dim: int) -> ParameterView:
        """Return a parameter sharded along ``dim`` by the parts that ranks use.

        Plainly if the parts are plain.
        """
        size = self.shapes[self.canonical[name]][dim]
        if size % self.tp:
            return ParameterView(uses=uses, uses_dim=dim, partial=True)
        if all(used == (chunk(size, self.tp, rank),) for rank, used in enumerate(uses)):
            return ParameterView(dim=dim)
        return ParameterView(dim=dim, uses=uses, uses_dim=dim)


def _styles(modules: dict[str, ModuleShard], spec: ModelSpec) -> dict[str, str]:
    """Map module patterns to styles, for sharded modules."""
    words = {"colwise_gather": "colwise_gather_output"}
    blocks = spec.blocks
    return {
        starred(name, blocks): words.get(shard.kind, shard.kind)
        for name, shard in modules.items()
        if shard.kind != "reads"
    }
