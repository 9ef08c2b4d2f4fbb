"""LoRA and QLoRA profiles: a frozen base with trainable adapters at its linear layers.

An adapter of rank r beside a linear layer of k inputs and n outputs has A [r, k] and B [n, r], adds x·Aᵀ·Bᵀ to the
layer's output and is stored in fp32. Sources: LoRA, arXiv:2106.09685, section 4; QLoRA, arXiv:2305.14314, sections 2–3:
NF4 takes 4 bits a weight and a scale for each block of 64, in fp32 (4.5 bits) or, with double quantisation, in 8 bits
with an fp32 scale for each 256 of them: 4.127 bits (4 + 8/64 + 32/(64·256)).

A quantized weight is dequantized to the compute dtype while its layer runs, forward and backward: that does not grow
with the samples, so it is not an op's ``temporary``; `unpacked_elements` is its size.

Stacked experts are parameters and not linear layers, so no adapter stands beside them and ``qlora`` leaves them in the
compute dtype; so it is with routers, which are modules of their own. Shared experts are linear layers like any other.

Dropout in front of an adapter saves its own copy of the input and a mask: a byte per element on a GPU, where it is one
kernel, and an element of the input's dtype on a CPU. DoRA (arXiv:2402.09353) adds a trained magnitude for each output
and saves the results of base and adapter for its gradient. Not counted: DoRA's temporaries for the norm of W + BA (a
weight or two, whatever the samples), bnb's tables of 16 and 256 numbers, paged optimizer states, the scale factor
(folded into B's product).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.errors import PlanError, did_you_mean
from shardwise.model.operations import mark_selective
from shardwise.model.profile import ModelProfile, Op, TpSharding, Unit, Weight

BF16_BYTES = 2.0
BLOCK, SCALES_BLOCK = 64, 256  # weights that share a scale; scales that share one (bitsandbytes)
NF4_BYTES = (4 + 8 / BLOCK + 32 / (BLOCK * SCALES_BLOCK)) / 8
NF4_PLAIN_BYTES = (4 + 32 / BLOCK) / 8
# Host time of an adapter's op, of a block's: `layer_time.EAGER_LAUNCHES` holds for Megatron's modules with their casts
# and small kernels; PEFT's are bare calls of functional.linear, dropout, mul and add. An estimate.
ADAPTER_LAUNCHES = 0.4
KINDS = ("lora", "qlora")
ROLES = ("all-linear", "attention", "mlp")
_ATTENTION = ("q", "k", "v", "qkv", "o")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Adapter facts that determine bytes and seconds; defaults are those of this package.

    ``targets`` are roles, ends of module names (``q_proj``) or names of ops (``q``); empty means all linear layers.
    ``base_bytes`` are the bytes per element of the unquantized frozen base, ``adapter_bytes`` of the adapters. The
    others describe a program: ``copies_inputs``, each adapter casts its input and saves the copy (autocast over fp32
    adapters); ``mask_bytes``, saved by dropout per element; ``keeps_inputs``, quantized layers save theirs
    (bitsandbytes before 0.43.2, see its change log). ``modules_to_save`` are trained in full, in ``adapter_bytes``.
    """

    rank: int = 16
    targets: tuple[str, ...] = ()
    double_quant: bool = True
    dropout: bool = False
    dora: bool = False
    base_bytes: float = BF16_BYTES
    adapter_bytes: float = 4.0
    copies_inputs: bool = False
    mask_bytes: int = 1
    keeps_inputs: bool = False
    modules_to_save: tuple[str, ...] = ()

    def trains(self, weight: Weight) -> bool:
        """Return whether a weight is of a module that is trained in full."""
        inside = f".{weight.name}"
        return any(f".{name}." in inside for name in self.modules_to_save)

    @property
    def quantized_bytes(self) -> float:
        """Bytes of a quantized weight."""
        return NF4_BYTES if self.double_quant else NF4_PLAIN_BYTES


def with_adapters(
    profile: ModelProfile,
    adapter: str,
    rank: int = 16,
    targets: Collection[str] | None = None,
    *,
    facts: AdapterFacts | None = None,
) -> ModelProfile:
    """Freeze the base of ``profile`` and add adapters of ``rank`` to its blocks' linear layers.

    ``adapter`` is ``lora`` or ``qlora``, or anything with such a word as its ``.adapter``; ``none`` changes nothing.
    ``targets`` are as in `AdapterFacts`; ``None`` means all with an untied weight. ``facts`` replaces ``rank`` and
    ``targets``.


    Raises:
        PlanError: an invalid adapter, rank or target.
    """
    kind = str(getattr(adapter, "adapter", adapter))
    if kind == "none":
        return profile
    facts = facts or AdapterFacts(rank=rank, targets=tuple(targets or ()))
    problems = []
    if kind not in KINDS:
        problems.append(f"adapter '{kind}' is none of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if facts.rank < 1:
        problems.append(f"LoRA rank {facts.rank} must be 1 or more")
    known = {name for unit in profile.units if unit.kind == "block" for name in _linears(unit)}
    chosen, wrong = _chosen(profile, facts.targets)
    ends = {_end(unit, i) for unit in profile.units if unit.kind == "block" for i in _linears(unit).values()}
    paths = [w.name.split(".") for unit in profile.units for w in unit.weights if w.experts]
    stacked = {part for path in paths for part in path} - {"mlp", "weight"}
    problems += [
        f"LoRA target '{name}' is a stack of experts, and adapters stand beside linear layers; name some of "
        f"{', '.join(sorted(ends))}"
        if name in stacked
        else f"LoRA target '{name}' is not a linear layer of the blocks"
        f"{did_you_mean(name, [*known, *sorted(ends), *ROLES])}; there are {', '.join(sorted(ends)) or 'none'}"
        for name in wrong
    ]
    if not known:
        problems.append(f"model '{profile.name}' has no linear layers in repeated blocks for adapters")
    if problems:
        raise PlanError(*problems)
    units, began = [], False
    tied = _tied_in_full(profile, facts)
    for unit, own in _with_own_names(profile, facts):
        adapts = unit.kind == "block" and bool(chosen & set(_linears(unit)))
        units.append(_adapted(unit, kind, own, chosen) if adapts else _frozen(unit, own, tied, backward=began))
        began = began or adapts or any(map(own.trains, unit.weights))
    notes = profile.unknown
    if profile.experts:
        notes += (
            "experts have no adapters, and stay in the compute dtype" + " beside 4-bit layers" * (kind == "qlora"),
        )
    return replace(profile, units=tuple(units), unknown=notes)


def _with_own_names(profile: ModelProfile, facts: AdapterFacts) -> Iterator[tuple[Unit, AdapterFacts]]:
    """Yield units with the ``modules_to_save`` that are theirs, by the names of their own weights.

    A name may say where the unit is (``model.embed_tokens``), which its weights do not. One block that is named
    (``model.layers.3.mlp``) becomes a unit of its own, apart from those like it.
    """
    first = 0
    for unit in profile.units:
        paths = [weight.name.rpartition(".")[0] for weight in unit.weights]
        owners = {".".join(path.split(".")[: end + 1]) for path in paths for end in range(path.count(".") + 1)}
        if unit.kind != "block":
            names = [own for name in facts.modules_to_save for own in owners if _is_path_to(name, own)]
            yield unit, replace(facts, modules_to_save=(*facts.modules_to_save, *names))
            continue
        inside: dict[int, list[str]] = {}
        for name in facts.modules_to_save:
            parts = name.split(".")
            if any(f".{name}." in f".{path}." for path in paths):
                continue  # of every block
            for place, part in enumerate(parts):
                rest = ".".join(parts[place + 1 :])
                if part.isdecimal() and (not rest or rest in owners):
                    inside.setdefault(int(part) - first, []).extend([rest] if rest else paths)
                    break
        done = 0
        for number in sorted(set(inside) & set(range(unit.count))):
            if number > done:
                yield replace(unit, count=number - done), facts
            named = (*facts.modules_to_save, *inside[number])
            yield replace(unit, count=1), replace(facts, modules_to_save=named)
            done = number + 1
        if done < unit.count:
            yield replace(unit, count=unit.count - done), facts
        first += unit.count


def _is_path_to(name: str, own: str) -> bool:
    """Return whether a name is ``own``, or that with the modules around it, none of which is one of many."""
    return f".{name}".endswith(f".{own}") and not any(map(str.isdecimal, name.removesuffix(own).split(".")))


def without_adapters(profile: ModelProfile) -> ModelProfile:
    """Return what runs where the adapters are off: their products, sums and weights are left out."""
    units = tuple(
        replace(
            unit,
            ops=tuple(op for op in unit.ops if ".lora_" not in op.name),
            weights=tuple(weight for weight in unit.weights if ".lora_" not in weight.name),
            autocast_ops=(),
        )
        for unit in profile.units
    )
    return replace(profile, units=units)


def unpacked_elements(unit: Unit) -> int:
    """Elements of the largest weight that is dequantized while its layer runs; 0 if none."""
    return max((w.num_elements for w in unit.weights if w.itemsize < 1), default=0)


def _chosen(profile: ModelProfile, targets: tuple[str, ...]) -> tuple[set[str], list[str]]:
    """Return the ops that get an adapter, and the targets that match no role, name or op."""
    chosen: set[str] = set()
    found: set[str] = set()
    wanted = targets or ("all-linear",)
    for unit in profile.units:
        for op, index in _linears(unit).items() if unit.kind == "block" else ():
            path = unit.weights[index].name.removesuffix(".weight")
            role = "attention" if op in _ATTENTION or "att" in path.rpartition(".")[0] else "mlp"
            matches = {t for t in wanted if t in (op, role, "all-linear", path) or path.endswith(f".{t}")}
            found |= matches
            chosen |= {op} if matches else set()
    return chosen, sorted(set(targets) - found)


def _end(unit: Unit, index: int) -> str:
    return unit.weights[index].name.removesuffix(".weight").rpartition(".")[2]


def _linears(unit: Unit) -> dict[str, int]:
    """Map matmuls with their own weight to its index.

    Weights and matmuls come in one order.
    """
    weights = [index for index, weight in enumerate(unit.weights) if len(weight.shape) == 2]
    found: dict[str, int] = {}
    for op in unit.ops:
        if op.kind != "matmul" or not op.weight or op.experts:
            continue
        fits = [i for i in weights if sorted(unit.weights[i].shape) == sorted((op.n, op.k))]
        if fits:
            weights.remove(fits[0])
            if op.name != "router":
                found[op.name] = fits[0]
    return found


def _tied_in_full(profile: ModelProfile, facts: AdapterFacts) -> dict[str, tuple[int, ...]]:
    """Map the names of weights that are trained in full and used by another unit, too, to their shapes."""
    names = {name for pair in profile.tied for name in pair}
    paths = [name.rpartition(".")[0] for name in names]
    named = any(_is_path_to(want, path) for want in facts.modules_to_save for path in paths)
    if not named and not any(facts.trains(Weight(name, ())) for name in names):
        return {}
    return {w.name: w.shape for unit in profile.units for w in unit.weights if w.name in names}


def _frozen(unit: Unit, facts: AdapterFacts, tied: Mapping[str, tuple[int, ...]], *, backward: bool) -> Unit:
    """Freeze a unit: no weight gradients, and inputs needed only for them are not saved.

    Without ``backward`` nothing before the unit trains, and nothing is saved. Weights that are trained in full, or
    named in ``tied``, stay as they are.
    """
    whole = {w.name for w in unit.weights if facts.trains(w) or w.name in tied}
    weights = tuple(_stored(w, facts, trained=w.name in whole) for w in unit.weights)
    own = {w.shape for w in unit.weights}
    shapes = {w.shape for w in unit.weights if w.name in whole} | {shape for shape in tied.values() if shape not in own}
    sizes = [sorted(shape) for shape in shapes if len(shape) == 2]

    def trains(op: Op) -> bool:
        if op.kind == "matmul":
            return op.weight and sorted((op.n, op.k)) in sizes
        return bool(whole) and (op.weight or op.kind == "embedding")

    backward = backward or bool(whole)
    ops = tuple(op if trains(op) else _without_gradient(op, backward=backward) for op in unit.ops)
    return replace(unit, weights=weights, ops=ops)


def _stored(weight: Weight, facts: AdapterFacts, *, trained: bool) -> Weight:
    """Return a weight of the base as it is stored, frozen or trained in full."""
    return replace(weight, itemsize=facts.adapter_bytes if trained else facts.base_bytes, trainable=trained)


def _without_gradient(op: Op, *, backward: bool) -> Op:
    if not backward and op.kind != "loss":
        return replace(op, weight=False, saved=0, saved_fp32=0, saved_bytes=0, temporary=op.temporary + op.saved)
    if op.kind in ("matmul", "conv") and op.weight:
        return replace(op, weight=False, saved=0, temporary=op.temporary + op.saved)
    return replace(op, weight=False, saved_bytes=0) if op.kind == "embedding" else op


def _adapted(unit: Unit, kind: str, facts: AdapterFacts, chosen: Collection[str]) -> Unit:
    """Add adapters to a block.

    An input is saved where an adapter reads it; readers of one input share one storage, unless each adapter has its own
    copy.
    """
    owned = _linears(unit)
    own = facts.dropout or facts.copies_inputs
    base, added = _base(unit, kind, facts, owned), list[Weight]()
    ops: list[Op] = []
    pending = 0  # an input of linear layers without an adapter, not saved by them
    for before, op in zip((None, *unit.ops), unit.ops, strict=False):
        if op.kind == "matmul" and (op.experts or op.name == "router"):
            pending = pending if op.experts else op.saved or pending
            ops.append(_without_gradient(op, backward=True))
            continue
        if op.name not in owned:
            ops.append(replace(op, weight=op.weight and op.kind == "matmul"))
            continue
        weight, takes = unit.weights[owned[op.name]], op.name in chosen
        if facts.trains(weight):
            ops.append(op)
            continue
        kept_already = not op.saved and before is not None and before.kind == "attention"
        pending = op.saved or pending
        reads = (takes and not own) or (kind == "qlora" and facts.keeps_inputs)
        kept = pending if reads and not kept_already else 0
        left = op.temporary + max(0, op.saved - kept)
        unpacks = 1 if kind == "qlora" else 0
        ops.append(replace(op, weight=False, saved=kept, temporary=left, launches=op.launches + unpacks))
        pending -= kept
        if takes:
            added += _adapter_weights(weight, op, facts)
            ops += _adapter_ops(op, facts)
    marked = mark_selective(ops)
    return replace(unit, weights=(*base, *added), ops=marked)


def _base(unit: Unit, kind: str, facts: AdapterFacts, owned: dict[str, int]) -> list[Weight]:
    """Freeze a block's own weights; with ``qlora`` its linear layers' are quantized."""
    quantised = set(owned.values()) if kind == "qlora" else set()
    packed = facts.quantized_bytes
    return [
        replace(w, itemsize=packed, trainable=False, scales=packed - 0.5)
        if index in quantised
        else _stored(w, facts, trained=facts.trains(w))
        for index, w in enumerate(unit.weights)
    ]


def _adapter_weights(weight: Weight, op: Op, facts: AdapterFacts) -> list[Weight]:
    """Return A and B; tensor parallel shards the one on the layer's sharded side."""
    stem, size = weight.name.removesuffix(".weight"), facts.adapter_bytes
    column = 0 if op.tp_sharding == "column" else None
    found = [
        Weight(f"{stem}.lora_A.weight", (facts.rank, op.k), size, tp_dim=1 if op.tp_sharding == "row" else None),
        Weight(f"{stem}.lora_B.weight", (op.n, facts.rank), size, tp_dim=column),
    ]
    if facts.dora:
        found.append(Weight(f"{stem}.lora_magnitude_vector.weight", (op.n,), size, tp_dim=column))
    return found


def _adapter_ops(op: Op, facts: AdapterFacts) -> list[Op]:
    """Return the two small products and the sum.

    B's product saves A's; the sum saves nothing, but with DoRA both operands. An adapter's own copy of its input is
    saved by A's product, dropout's mask by the dropout.
    """
    inner: TpSharding = "row" if op.tp_sharding == "row" else "none"
    outer: TpSharding = "column" if op.tp_sharding == "column" else "none"
    rank, small, large, read = facts.rank, op.m * facts.rank, op.m * op.n, op.m * op.k
    copied = read if facts.dropout or facts.copies_inputs else 0
    found = []
    if facts.dropout:  # one kernel reads the input and writes the result and the mask
        mask = read * facts.mask_bytes
        found.append(
            Op(
                f"{op.name}.lora_dropout",
                "pointwise",
                moved=2 * read + read // 2,
                launches=ADAPTER_LAUNCHES,
                saved_bytes=mask,
                tp_sharding=inner,
            )
        )
    sides = 2 * large if facts.dora else 0
    return [
        *found,
        Op(
            f"{op.name}.lora_A",
            "matmul",
            op.m,
            op.k,
            rank,
            flops=2.0 * op.k * small,
            launches=ADAPTER_LAUNCHES,
            saved=copied,
            tp_sharding=inner,
            weight=True,
        ),
        Op(
            f"{op.name}.lora_B",
            "matmul",
            op.m,
            rank,
            op.n,
            flops=2.0 * rank * large,
            launches=ADAPTER_LAUNCHES,
            saved=small,
            temporary=large,
            tp_sharding=outer,
            weight=True,
        ),
        Op(
            f"{op.name}.lora_sum",
            "pointwise",
            moved=5 * large + sides,
            launches=(2 + (2 if facts.dora else 0)) * ADAPTER_LAUNCHES,
            saved=sides,
            temporary=large,
            tp_sharding=outer,
            fusible=True,
        ),
    ]
