"""Chunked loss of a large vocabulary: at most ``tokens / chunks`` rows of logits at once.

The head's forward does not multiply: it returns `LateLogits`, which store the hidden states and the head. The loss
(`LateLogits.loss_sum`) multiplies chunk by chunk, and computes each chunk's gradients while its logits exist, so that
the head's three products are computed once each, as without chunks. Between the loss and its backward only the
gradients of the hidden states and of the head's weight are kept. In fp16, whose gradients need the loss scale, which
only backward knows, chunks are multiplied a second time there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree

from shardwise.errors import ModelError, PlanError
from shardwise.model.facts import ModelSpec
from shardwise.parallel.fake_forward import inputs_of, run_forward
from shardwise.parallel.loss_terms import LossTerms
from shardwise.plan.plan import Plan, chunk_problems

_FIX = "take loss_chunks out"
_NARROW = (torch.bfloat16, torch.float16)
_MISUSE = (
    "the plan's loss_chunks computes the logits in chunks; give the outputs to shardwise.token_loss_sum, or "
    "call .whole() on the logits if all of them are needed"
)


@dataclass(frozen=True)
class OutputHead:
    """Linear layer that computes the model's logits, and the number of its columns."""

    name: str
    vocab: int


class _Head:
    """State of the head in a forward: weights (gathered if sharded) and compute dtype.

    ``strict``: only the loss may read the logits, even without gradients. Not a dataclass: FSDP2 searches those
    for tensors to hook and to cast, and must find only the hidden states.
    """

    def __init__(self, head: nn.Linear, dtype: torch.dtype, chunks: int, strict: bool) -> None:
        self.weight, self.bias = head.weight, head.bias
        self.dtype, self.chunks, self.strict = dtype, chunks, strict


@dataclass(eq=False)
class LateLogits:
    """Logits [..., vocabulary] that are not computed yet: ``hidden`` [..., width] and the head.

    Without gradients (`torch.no_grad`, so also in ``generate``) all of them are computed as soon as anything but the
    loss reads them. With gradients that is an error: it would use the memory that chunks avoid.
    """

    hidden: torch.Tensor
    head: _Head

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.head.weight.shape[0]))

    def float(self) -> LateLogits:
        """Return itself: the loss is computed in fp32 (float64 for a float64 head)."""
        return self

    def full(self) -> torch.Tensor:
        """Compute all logits at once, in fp32 (float64 for a float64 head)."""
        weight, bias = _as(self.head.weight, self.head.dtype), _as(self.head.bias, self.head.dtype)
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = functional.linear(self.hidden.to(self.head.dtype), weight, bias)
        return logits.float() if logits.dtype in _NARROW else logits

    def loss_sum(self, labels: torch.Tensor, ignored: int, terms: LossTerms = LossTerms()) -> torch.Tensor:
        """Summed cross-entropy of ``labels`` [...] that are not ``ignored``, with ``terms``.

        0-d, in fp32 (float64 for a float64 head).
        """
        head, flat = self.head, self.hidden.flatten(0, -2)
        how = _How(head.dtype, chunk_rows(len(flat), head.chunks), head.chunks, ignored, terms)
        if not torch.is_grad_enabled():
            return _in_chunks((flat, head.weight, head.bias), labels.flatten(), how, (False,) * 3)[0]
        found: torch.Tensor = _ChunkedLoss.apply(flat, head.weight, head.bias, labels.flatten(), how)
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._closed:
            raise AttributeError(f"'{name}' of logits that are not made: {_MISUSE}")
        return getattr(self.full(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._made("a part")[index]

    @property
    def _closed(self) -> bool:
        return self.head.strict or torch.is_grad_enabled()

    def _made(self, what: str) -> torch.Tensor:
        if self._closed:
            raise ModelError(f"{what} of logits that are not made: {_MISUSE}")
        return self.full()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def made(value: Any) -> Any:
            return value._made(getattr(func, "__name__", "a function")) if isinstance(value, LateLogits) else value

        args, kwargs = _pytree.tree_map(made, (args, kwargs or {}), is_leaf=lambda leaf: isinstance(leaf, LateLogits))
        return func(*args, **kwargs)


# FSDP2 (as in any dataclass) and autocast's wrapper here find the hidden states when they search an output for tensors
_pytree.register_pytree_node(
    LateLogits,
    lambda late: ([late.hidden], late.head),
    lambda children, head: LateLogits(next(iter(children)), head),
    serialized_type_name="shardwise.LateLogits",
)


def chunk_rows(tokens: int, chunks: int) -> int:
    """Return the number of logit rows per chunk; the last chunk may be smaller."""
    return max(1, math.ceil(tokens / chunks))


def find_head(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> OutputHead:
    """Find the output head by two fake forwards, and check that its logits can be deferred.

    No rank is needed, nothing is changed, weights may be on the meta device.

    Raises:
        PlanError: the plan splits the model in a way that loss chunks do not support.
        ModelError: the logits are not the direct output of a linear layer; names the obstacle.
    """
    if problems := chunk_problems(plan):
        raise PlanError(*problems)
    args, kwargs = inputs_of(sample, plan.seq_len)
    seen: list[tuple[str, tuple[int, ...]]] = []
    hooks = [
        part.register_forward_hook(lambda _, __, made, name=name: seen.append((name, tuple(made.shape))))
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward
    ]
    try:
        outputs, failure = run_forward(module, args, kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if failure:
        raise ModelError(f"loss_chunks: the model's forward cannot be traced under fake tensors ({failure}); {_FIX}")
    logits = _logits_of(outputs)
    if not isinstance(logits, torch.Tensor):
        raise ModelError(
            f"loss_chunks: the model returns a {type(outputs).__name__}, and must return its logits, alone or as "
            f".logits; change the model, or {_FIX}"
        )
    name = next((name for name, shape in reversed(seen) if shape == tuple(logits.shape)), None)
    if name is None:
        raise ModelError(
            f"loss_chunks: the logits {list(logits.shape)} are not what an nn.Linear puts out; make the head an "
            f"nn.Linear (one whose weight is the embedding's, if they are tied), or {_FIX}"
        )
    times = sum(one == name for one, _ in seen)
    if times > 1:
        raise ModelError(f"loss_chunks: '{name}' runs {times} times in one forward; {_FIX}")
    if any(f"{name}.".startswith(f"{block}.") for block in spec.blocks):
        raise ModelError(f"loss_chunks: the head '{name}' is one of the repeated blocks; {_FIX}")
    _check_nothing_follows(module, name, args, kwargs)
    return OutputHead(name, logits.shape[-1])


def _logits_of(outputs: Any) -> Any:
    return outputs if isinstance(outputs, torch.Tensor | LateLogits) else getattr(outputs, "logits", None)


def _check_nothing_follows(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a forward with deferred logits returns them unchanged.

    Reading or changing them fails.
    """
    head = _linear(module, name)
    vars(head)["forward"] = functools.partial(_late_forward, head, 1, True)
    try:
        outputs, failure = run_forward(module, args, kwargs)
    finally:
        del vars(head)["forward"]
    why = failure or ("" if isinstance(_logits_of(outputs), LateLogits) else "the model returns something else")
    if why:
        raise ModelError(
            f"loss_chunks: the logits are not simply what '{name}' puts out: the model reads or changes them "
            f"afterwards (as soft-capping and scaling do), which chunks would leave out ({why}); {_FIX}"
        )


def apply_loss_chunks(module: nn.Module, head: OutputHead, chunks: int) -> None:
    """Make ``head`` return `LateLogits` whose loss is computed in ``chunks`` chunks. In place."""
    part = _linear(module, head.name)
    vars(part)["forward"] = functools.partial(_late_forward, part, chunks, False)


def _linear(module: nn.Module, name: str) -> nn.Linear:
    part = module.get_submodule(name)
    if not isinstance(part, nn.Linear):
        raise ModelError(f"loss_chunks: '{name}' is a {type(part).__name__}, not an nn.Linear; {_FIX}")
    return part


def _late_forward(head: nn.Linear, chunks: int, strict: bool, hidden: torch.Tensor) -> LateLogits:
    kind, dtype = hidden.device.type, head.weight.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    if torch.is_grad_enabled():
        hidden = _Enter.apply(hidden, head.weight)
    return LateLogits(hidden, _Head(head, dtype, chunks, strict))


class _Enter(Function):
    """Return hidden states as a non-view output that needs a gradient if the head does.

    FSDP2 attaches its pre-backward hook to such a tensor, and warns about views.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


@dataclass(frozen=True)
class _How:
    """Options of the chunked loss: compute dtype, rows and number of chunks, ignored label, and its terms."""

    dtype: torch.dtype
    rows: int
    chunks: int
    ignored: int
    terms: LossTerms


class _ChunkedLoss(Function):
    """Summed cross-entropy of ``hidden`` [tokens, width], ``rows`` tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, how: _How
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad[:3]
        late = how.dtype == torch.float16 and any(needs)
        loss, ctx.found = _in_chunks((hidden, weight, bias), labels, how, (False,) * 3 if late else needs)
        ctx.how, ctx.dtypes = how, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        if late:
            ctx.save_for_backward(hidden, weight, bias, labels)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError("the chunked loss goes backward once: its gradients are not kept")
        if ctx.saved_tensors:
            *operands, labels = ctx.saved_tensors
            _, found = _in_chunks(operands, labels, ctx.how, ctx.needs_input_grad[:3], grad)
        else:
            found = [part if part is None else part.mul_(grad) for part in found]
        given = [_as(part, dtype) for part, dtype in zip(found, ctx.dtypes, strict=True)]
        return *given, None, None


def _in_chunks(
    operands: Any, labels: torch.Tensor, how: _How, needs: tuple[bool, ...], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Compute the summed loss and the required gradients of hidden states, weight and bias.

    They are those of the loss times ``scale``; sums over tokens are fp32 (float64 for a float64 head).
    """
    hidden, weight, bias = operands
    wide = torch.float32 if how.dtype in _NARROW else how.dtype
    found = [
        torch.zeros(one.shape, dtype=wide, device=one.device) if need else None
        for one, need in zip(operands, needs, strict=True)
    ]
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    weight, bias = _as(weight, how.dtype), _as(bias, how.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), how.rows):
            rows = hidden[start : start + how.rows].to(how.dtype)
            logits = functional.linear(rows, weight, bias).to(wide)
            loss += _loss_of(logits, labels[start : start + how.rows], how, gradient=any(needs))
            if any(needs):
                logits = logits if scale is None else logits.mul_(scale)
                _add(found, logits, rows, weight, start, how)
            del logits
    return loss, found


def _loss_of(logits: torch.Tensor, labels: torch.Tensor, how: _How, *, gradient: bool) -> torch.Tensor:
    """Compute a chunk's summed loss.

    With ``gradient``, overwrite ``logits`` with their gradient.
    """
    counts, terms, vocab = labels != how.ignored, how.terms, logits.shape[-1]
    at = labels.masked_fill(~counts, 0).unsqueeze(-1)
    largest = logits.amax(-1, keepdim=True)
    logits.sub_(largest)
    total = logits.sum(-1, keepdim=True) if terms.label_smoothing else None
    target = terms.target(logits.gather(-1, at), total, vocab)
    sums = logits.exp_().sum(-1, keepdim=True)
    logsumexp = sums.log()
    loss = logsumexp - target
    logsumexp.add_(largest)
    if terms.z_loss:
        loss += terms.z_loss * logsumexp.square()
    if gradient:
        terms.to_gradient(logits.div_(sums), logsumexp, at, 1.0, vocab)
        logits.masked_fill_(~counts.unsqueeze(-1), 0)
    return loss.squeeze(-1).masked_fill_(~counts, 0).sum()


def _add(
    found: list[torch.Tensor | None],
    gradient: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    how: _How,
) -> None:
    """Accumulate a chunk's gradients, computed from the gradient of its logits."""
    of_hidden, of_weight, of_bias = found
    if of_bias is not None:
        of_bias += gradient.sum(0)
    narrow = gradient.to(how.dtype)
    if of_hidden is not None:
        of_hidden[start : start + how.rows] = narrow @ weight
    if of_weight is None:
        return
    if narrow.dtype == of_weight.dtype:
        of_weight.addmm_(narrow.t(), rows)
        return
    for part, columns in zip(of_weight.chunk(how.chunks), narrow.chunk(how.chunks, dim=1), strict=True):
        part += columns.t() @ rows


def _as(tensor: Any, dtype: Any) -> Any:
    return None if tensor is None else tensor.to(dtype)
