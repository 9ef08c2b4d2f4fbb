"""Check the sharding of one block: run each rank's share, compare with the unsharded run.

The linear layers return the same numbers as in the unsharded run (each rank its columns of them), so the comparison
covers all that runs between: the inputs of the rows, the outputs of the block, and all their gradients,
combined as the ranks would combine them. Attributes that must differ on a rank (a number of heads, a width to split
by) are found by search: the smallest change of integer attributes under which everything agrees.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.model.flow import BlockRun, Call, Flow, Product, main_output, put
from shardwise.parallel.tensor_parallel.regions import Regions
from shardwise.parallel.tensor_parallel.tensor_layout import CONFIG, Slices, chunk, set_numbers

CLOSE = 1e-4  # norms compute in fp32 regardless of the input dtype
TRIALS = 500
CONFIG_READ = "config."


class _Differs(Exception):
    """Raised when a rank's result is not its share of the unsharded result."""


class BlockCheck:
    """Compare the shares of ``tp`` ranks with the unsharded run of one block."""

    def __init__(self, flow: Flow, run: BlockRun, tp: int, *, sequence: bool) -> None:
        self.flow, self.run, self.tp, self.sequence = flow, run, tp, sequence
        self.prefix = f"{run.name}."
        self.block = flow.submodule(run.name)
        main = main_output(run.output, run.hidden)
        self.has_output = main is not None
        self.output = run.hidden if main is None else main
        self.parameters = {n: p for n, p in flow.parameters.items() if n.startswith(self.prefix) and p.requires_grad}
        self.calls = {(call.product.name, call.count): call for call in run.calls}

    def solve_attributes(self, found: Regions) -> str | None:
        """Find attributes that make ``found`` correct, and where sequences are gathered.

        Else return the difference.

        A module's own attributes are tried before those of its configuration.
        """
        entered = [found.entries, {}] if self.sequence and found.entries else [{}]
        becomes = self._becomes(found)
        options = self._candidates(found, becomes)
        own = [option for option in options if not option[1].startswith(CONFIG)]
        reason: str | None = None
        trials: set[str] = set()
        for some in (own, options):
            for attributes in _changes(some):
                if repr(attributes) in trials:
                    continue
                trials.add(repr(attributes))
                for entries in entered:
                    found.attributes, found.entries = attributes, entries
                    why = self.differs(found)
                    if why is None:
                        self._complete(found)
                        return None
                    reason = reason or why
                if len(trials) > TRIALS:
                    break
        found.attributes, found.entries = {}, entered[0]
        return reason

    def differs(self, found: Regions) -> str | None:
        """Return the first difference under ``found``, or ``None``."""
        if not self.has_output:
            return f"its output has no tensor of the hidden states' shape {tuple(self.run.hidden.shape)}"
        try:
            shares = [self._share(found, rank) for rank in range(self.tp)]
            self._compare(found, self._full(found), shares)
        except _Differs as error:
            return str(error)
        except Exception as error:
            return f"with a rank's share of the columns its forward raises {type(error).__name__}: {_line(error)}"
        return None

    def _complete(self, found: Regions) -> None:
        """Set other attributes named for heads to the rank's number too, where that is harmless.

        This forward did not use them; one with a mask, or without gradients, may.
        """
        if not self.run.attentions:
            return
        one = self.run.attentions[0]
        heads, kv_heads = one.heads // self.tp, max(1, one.kv_heads // self.tp)
        meanings = {
            "group": (one.heads // one.kv_heads, max(1, heads // kv_heads)),
            "kv": (one.kv_heads, kv_heads),
            "key_value": (one.kv_heads, kv_heads),
            "head": (one.heads, heads),
        }
        for path, part in self.block.named_modules():
            for key, value in list(vars(part).items()):
                meant = next((numbers for word, numbers in meanings.items() if word in key), None)
                if "dim" in key or "size" in key or meant is None or type(value) is not int:
                    continue
                if value != meant[0] or value == meant[1] or key in found.attributes.get(path, {}):
                    continue
                before = found.attributes
                found.attributes = {**before, path: {**before.get(path, {}), key: meant[1]}}
                if self.differs(found) is not None:
                    found.attributes = before

    def _becomes(self, found: Regions) -> dict[int, set[int]]:
        """Map each number that stands for a sharded size to its possible values on one rank."""
        outs = {c.product.outputs for c in self.run.calls if c.product.name.removeprefix(self.prefix) in found.columns}
        sizes = outs | set(found.rows.values()) | {n // 2 for n in outs} | {n // 3 for n in outs}
        becomes: dict[int, set[int]] = {}
        for size in sizes:
            if size % self.tp == 0:
                becomes.setdefault(size, set()).add(size // self.tp)
        for one in self.run.attentions:
            heads, kv_heads = one.heads // self.tp, max(1, one.kv_heads // self.tp)
            becomes.setdefault(one.heads, set()).add(heads)
            becomes.setdefault(one.kv_heads, set()).add(kv_heads)
            becomes.setdefault(one.heads // one.kv_heads, set()).add(max(1, heads // kv_heads))
        return becomes

    def _candidates(self, found: Regions, becomes: dict[int, set[int]]) -> list[tuple[str, str, list[int]]]:
        """List integer attributes that may stand for a sharded size, with their new values."""
        options = []
        for (path, key), value in sorted(self._numbers().items()):
            new = {n for n in becomes.get(value, ()) if 0 < n != value}
            if not self.run.attentions and any(width % value == 0 for width in found.rows.values()):
                # attention without the fused operation: anything may be its heads, or queries for each head of keys
                new |= {value // d for d in range(2, self.tp + 1) if self.tp % d == 0 and value % d == 0}
            options += [(path, key, sorted(new))] if new else []
        return options

    def _numbers(self) -> dict[tuple[str, str], int]:
        """Return integers above 1 that the block's forward reads from modules and configuration."""
        seen: dict[tuple[str, str], int] = {}
        products = self.flow.paths_of_products(self.run.name)
        parts = {path: part for path, part in self.block.named_modules() if path not in products}
        configs = {id(c): c for p in parts.values() if (c := vars(p).get("config")) is not None}
        with contextlib.ExitStack() as stack:
            read: dict[int, dict[str, int]] = {key: {} for key in configs}
            for key, config in configs.items():
                stack.enter_context(_watched(config, read[key]))
            own = {path: stack.enter_context(_watched(part, {})) for path, part in parts.items()}
            calls = self.calls
            counts: dict[str, int] = {}

            def answer(product: Product, _: torch.Tensor) -> torch.Tensor:
                counts[product.name] = counts.get(product.name, -1) + 1
                return calls[product.name, counts[product.name]].leaf.detach()

            self.flow.run_block(self.run.name, self.run.args, self.run.kwargs, answer)
        for path, numbers in own.items():
            seen |= {(path, key): value for key, value in numbers.items()}
            if CONFIG_READ in numbers:
                config = vars(parts[path])["config"]
                seen |= {(path, f"{CONFIG}{key}"): value for key, value in read[id(config)].items()}
        return {key: value for key, value in seen.items() if value > 1 and key[1] != CONFIG_READ}

    def term(
        self,
        key: str,
        value: torch.Tensor,
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
        full: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a random linear function of ``value``, or of a ``part`` of ``full``.

        Every gradient of it is distinct.
        """
        weights = self.flow.numbers(key, (value if full is None else full).shape)
        return (value * (weights if part is None else part(weights))).sum()

    def _full(self, found: Regions) -> dict[int, torch.Tensor | None]:
        """Return the gradients of every leaf in the unsharded run."""
        total: Any = 0
        seen: set[int] = set()
        for call in self.run.calls:
            if call.product.is_lookup:
                continue
            name = call.product.name.removeprefix(self.prefix)
            group = found.groups.get(name)
            if group is None:
                total = total + self.term(f"{name}:{call.count}", call.value)
            elif group not in seen:
                seen.add(group)
                total = total + self.term(f"group:{group}", call.value)
        total = total + self.term("output", self.output)
        leaves = self._leaves()
        grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        return {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True)}

    def _leaves(self) -> list[torch.Tensor]:
        return [self.run.hidden, *(call.leaf for call in self.run.calls), *self.parameters.values()]

    def _share(self, found: Regions, rank: int) -> dict[int, torch.Tensor | None]:
        """Return the gradients of every leaf's share on ``rank``, by the leaf's id."""
        share = _Share(self, found, rank)
        with share.applied():
            hidden = share.part(self.run.hidden.detach()).clone().requires_grad_()
            args, kwargs = put(self.run.place, hidden.clone(), self.run.args, self.run.kwargs)
            shares = self._slices_of(found, rank)
            with self._placed(shares):
                output = _main(self.flow.run_block(self.run.name, args, kwargs, share.answer), hidden)
        _same(output, share.part(self.output), f"what {self.run.name} gives")
        total = share.total + self.term("output", output, share.part, self.output)
        leaves = {id(self.run.hidden): hidden, **share.leaves}
        leaves |= {id(p): shares.get(name, p) for name, p in self.parameters.items()}
        grads = torch.autograd.grad(total, [*leaves.values(), *share.gathered.values()], allow_unused=True)
        for name, grad in zip(share.gathered, grads[len(leaves) :], strict=True):
            if grad is not None and bool((grad != 0).any()):
                raise _Differs(f"{self.prefix}{name} uses what it is given in other ways than by its linear layers")
        return dict(zip(leaves, grads, strict=False))

    def _slices_of(self, found: Regions, rank: int) -> dict[str, nn.Parameter]:
        """Return this rank's slices of sharded parameters that belong to no linear layer."""
        shares = {}
        for name, split in found.inside.items():
            if split is not None:
                full = self.parameters[f"{self.prefix}{name}"].detach()
                shares[f"{self.prefix}{name}"] = nn.Parameter(full.index_select(split[0], indices(split[1][rank])))
        return shares

    @contextlib.contextmanager
    def _placed(self, shares: dict[str, nn.Parameter]) -> Iterator[None]:
        places = []
        for name, share in shares.items():
            parent, _, key = name.rpartition(".")
            place = self.flow.submodule(parent)._parameters
            places.append((place, key, place[key]))
            place[key] = share
        try:
            yield
        finally:
            for place, key, before in places:
                place[key] = before

    def _compare(self, found: Regions, full: dict[int, Any], shares: list[dict[int, Any]]) -> None:
        names = {id(self.run.hidden): "what goes in", **{id(p): n for n, p in self.parameters.items()}}
        columns = {}
        for call in self.run.calls:
            names[id(call.leaf)] = call.product.name
            name = call.product.name.removeprefix(self.prefix)
            if name in found.columns:
                columns[id(call.leaf)] = found.columns[name]
        for leaf in self._leaves():
            key, expected = id(leaf), full[id(leaf)]
            expected = torch.zeros_like(leaf) if expected is None else expected
            parts = [share.get(key) for share in shares]
            where = f"the gradient of {names[key]}"
            name = names[key].removeprefix(self.prefix)
            if key in columns:
                summed = torch.zeros_like(expected)
                for uses, grad in zip(columns[key], parts, strict=True):
                    if grad is not None:
                        summed.index_add_(-1, indices(uses), grad)
                _same(summed, expected, where)
            elif isinstance(leaf, nn.Parameter) and (self.sequence or name in found.inside):
                self._summed(found.inside.get(name), parts, expected, where)
            elif self.sequence and not isinstance(leaf, nn.Parameter):
                dim = 1
                pieces = expected.chunk(self.tp, dim)
                for grad, piece in zip(parts, pieces, strict=True):
                    _same(torch.zeros_like(piece) if grad is None else grad, piece, where)
            else:
                for grad in parts:
                    _same(torch.zeros_like(expected) if grad is None else grad, expected, where)

    def _summed(
        self, split: tuple[int, tuple[Slices, ...]] | None, parts: list[Any], expected: torch.Tensor, where: str
    ) -> None:
        summed = torch.zeros_like(expected)
        for rank, grad in enumerate(parts):
            if grad is None:
                continue
            if split is None:
                summed += grad
            else:
                summed.index_add_(split[0], indices(split[1][rank]), grad)
        _same(summed, expected, where)


class _Share:
    """Run of a block on one rank."""

    def __init__(self, check: BlockCheck, found: Regions, rank: int) -> None:
        self.check, self.found, self.rank = check, found, rank
        self.counts: dict[str, int] = {}
        self.seen: set[int] = set()
        self.total: Any = 0
        self.leaves: dict[int, torch.Tensor] = {}
        self.gathered: dict[str, torch.Tensor] = {}
        self.entered = {group for _, group in found.entries.values()}

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part along the sequence, if it is sharded."""
        return tensor.chunk(self.check.tp, 1)[self.rank] if self.check.sequence else tensor

    def answer(self, product: Product, value: torch.Tensor) -> torch.Tensor:
        """Return a product's result on this rank, after checking its input."""
        count = self.counts.get(product.name, 0)
        self.counts[product.name] = count + 1
        call = self.check.calls.get((product.name, count))
        if call is None:
            raise _Differs(f"{product.name} runs more often")
        name = product.name.removeprefix(self.check.prefix)
        where = f"what goes into {product.name}"
        given = call.leaf.detach()
        if product.is_lookup:
            return given
        if name in self.found.columns:
            group = self.found.groups[name]
            if group in self.entered:
                _same(value, call.value, where)
            else:
                self._enter(group, value, call, where)
            given = given.index_select(-1, indices(self.found.columns[name][self.rank]))
        elif name in self.found.rows:
            first, end = chunk(self.found.rows[name], self.check.tp, self.rank)
            _same(value, call.value[..., first:end], where)
            self.total = self.total + self.check.term(
                f"{name}:{count}", value, lambda full: full[..., first:end], call.value
            )
            given = self.part(given)
        else:
            _same(value, self.part(call.value), where)
            self.total = self.total + self.check.term(f"{name}:{count}", value, self.part, call.value)
            given = self.part(given)
        leaf = given.clone().requires_grad_()
        self.leaves[id(call.leaf)] = leaf
        return leaf.clone()

    def _enter(self, group: int, value: torch.Tensor, call: Call, where: str) -> None:
        _same(value, self.part(call.value), where)
        if group not in self.seen:
            self.seen.add(group)
            self.total = self.total + self.check.term(f"group:{group}", value, self.part, call.value)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set attributes to this rank's values, and gather arguments, within the context."""
        undo: list[Callable[[], None]] = []
        for name, changed in self.found.attributes.items():
            facts = (self.check.block.get_submodule(name) if name else self.check.block).__dict__
            before = {key.split(".")[0]: facts[key.split(".")[0]] for key in changed}
            set_numbers(facts, changed)
            undo.append(functools.partial(facts.update, before))
        for name, (place, group) in self.found.entries.items():
            call = next(
                c
                for c in self.check.run.calls
                if self.found.groups.get(c.product.name.removeprefix(self.check.prefix)) == group
            )
            module = self.check.flow.submodule(f"{self.check.prefix}{name}")
            hook = module.register_forward_pre_hook(self._gather(name, place, group, call), with_kwargs=True)
            undo.append(hook.remove)
        try:
            yield
        finally:
            for back in reversed(undo):
                back()

    def _gather(self, name: str, place: tuple[str, int | str], group: int, call: Call) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = args[int(place[1])] if place[0] == "args" else kwargs[str(place[1])]
            self._enter(group, value, call, f"what goes into {self.check.prefix}{name}")
            self.gathered[name] = call.value.detach().clone().requires_grad_()
            return put(place, self.gathered[name].clone(), args, kwargs)

        return hook


@contextlib.contextmanager
def _watched(owner: Any, seen: dict[str, int]) -> Iterator[dict[str, int]]:
    """Record in ``seen`` every integer read from ``owner``, and reads of its configuration."""
    kind: Any = type(owner)

    def read(self: Any, key: str) -> Any:
        value = kind.__getattribute__(self, key)
        if type(value) is int and not key.startswith("_"):
            seen[key] = value
        elif key == "config":
            seen[CONFIG_READ] = 1
        return value

    owner.__class__ = type(kind.__name__, (kind,), {"__getattribute__": read})
    try:
        yield seen
    finally:
        owner.__class__ = kind


def _changes(options: list[tuple[str, str, list[int]]]) -> Iterator[dict[str, dict[str, int]]]:
    """Yield every combination of attributes and their values, few changes first."""
    for size in range(len(options) + 1):
        for chosen in itertools.combinations(options, size):
            for values in itertools.product(*(new for _, _, new in chosen)):
                attributes: dict[str, dict[str, int]] = {}
                for (name, key, _), value in zip(chosen, values, strict=True):
                    attributes.setdefault(name, {})[key] = value
                yield attributes


def indices(slices: Slices) -> torch.Tensor:
    """Return the positions that slices cover."""
    return torch.cat([torch.arange(first, end) for first, end in slices])


def _main(output: Any, hidden: torch.Tensor) -> torch.Tensor:
    found = main_output(output, hidden)
    if found is None:
        raise _Differs(f"its output has no tensor of the hidden states' shape {tuple(hidden.shape)}")
    return found


def _same(found: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if found.shape != expected.shape:
        raise _Differs(f"{where} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not found.numel():
        return
    expected, found = expected.detach(), found.detach()
    gap, scale = (found - expected).abs().max(), expected.abs().max()
    if torch.isnan(gap) or torch.isinf(gap):  # from a mask, in both runs
        fine = torch.allclose(found, expected, rtol=CLOSE, equal_nan=True)
    else:
        fine = bool(gap <= CLOSE * scale.clamp_min(1e-6))
    if not fine:
        raise _Differs(f"{where} is not this rank's shard of the full result")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."
