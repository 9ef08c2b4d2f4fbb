"""Apply ``torch.compile`` to each repeated block, in place.

What is compiled is a block's forward with the recompute that is around it: hooks (of sharding, of pipeline stages) stay
outside, so a block is one graph. A graph break is an error, as is anything else that would make PyTorch fall back. What
cannot be compiled is seen before ranks start: one block of each kind is traced on tensors without data.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from shardwise.errors import ModelError, PlanError
from shardwise.model.facts import ModelSpec
from shardwise.parallel.context_parallel.ulysses import exchange_of
from shardwise.parallel.fake_forward import inputs_of, run_forward
from shardwise.plan.plan import Plan

_COMPILER = ("torch/_dynamo/", "torch/_functorch/", "torch/_inductor/")
_MARK = "_shardwise_compiled"
_KINDS = 4  # graphs of one block: training and evaluation, static and dynamic lengths
_FIX = "set parallel.compile to false"


@dataclass
class Compiled:
    """Effect of compilation, for a receipt: every call of a block must have run one graph.

    ``blocks`` are compiled blocks, ``graphs`` the graphs compiled (equal blocks share one; evaluation and another
    length add more), ``calls`` forwards of blocks and ``runs`` forwards of graphs.
    """

    blocks: int = 0
    graphs: int = 0
    calls: int = 0
    runs: int = 0

    def __call__(self, graph: Any, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        """Compile with Inductor, counting graphs and runs."""
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        inner: Any = compile_fx(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return inner(*args)

        return run


def apply_compile(blocks: Sequence[nn.Module], plan: Plan, compiled: Compiled | None = None) -> Compiled | None:
    """Compile each block separately (names and parameters stay); equal blocks share a graph.

    ``compiled`` is the result of an earlier call, where a model's blocks come in several parts.
    """
    if not plan.compile:
        return None
    import torch._dynamo

    # DDP's buckets would split blocks into graphs, and cannot split a block that is recomputed
    torch._dynamo.config.optimize_ddp = False
    # context parallel's exchange is enabled inside the recomputed region, so the graph need not enable it
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # blocks that differ in an attribute (a layer's number) are compiled one by one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS * len(blocks))
    compiled = compiled or Compiled()
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for block in blocks:
        kind = type(block)
        if kind not in kinds:
            kinds[kind] = _compiled_kind(kind, compiled)
        block.__class__ = kinds[kind]
        object.__setattr__(block, "_shardwise_exchanges", [e for part in block.modules() if (e := exchange_of(part))])
    compiled.blocks += len(blocks)
    return compiled


def compiled_of(module: nn.Module) -> Compiled | None:
    """Return the compilation record of the blocks of ``module``.

    ``None`` if nothing is compiled.
    """
    found = (getattr(type(part), _MARK, None) for part in module.modules())
    return next((compiled for compiled in found if compiled is not None), None)


def _compiled_kind(kind: type[nn.Module], compiled: Compiled) -> type[nn.Module]:
    """Return a subclass of ``kind`` with a compiled forward."""
    inner = torch.compile(kind.forward, fullgraph=True, backend=compiled)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.calls += 1
        for exchange in self._shardwise_exchanges:
            exchange.calls += 1
        try:
            return inner(self, *args, **kwargs)
        except Exception as error:
            raise _named(error, kind) from error

    members = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, _MARK: compiled}
    return type(kind.__name__, (kind,), members)


def _named(error: Exception, kind: type) -> Exception:
    """Turn a compiler error about user code into a `ModelError`.

    Return any other error unchanged.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    if not isinstance(error, TorchDynamoException | FailOnRecompileLimitHit):
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if not any(part in last for part in _COMPILER):
            return error
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return ModelError(f"PyTorch's compiler fails on a block ({kind.__name__}): {what}; {_FIX}")
    if isinstance(error, FailOnRecompileLimitHit):
        limit = torch._dynamo.config.recompile_limit
        return ModelError(
            f"a block ({kind.__name__}) was compiled {limit} times, each time for other shapes, attributes or modes, "
            f"and PyTorch stops there; make lengths and attributes of blocks alike, or {_FIX}"
        )
    return ModelError(f"a block ({kind.__name__}) cannot be compiled as one graph: {why_not(error)}; {_FIX}")


def why_not(error: Exception) -> str:
    """Summarize a compiler error in one line: PyTorch's reason, the cause and the user's line."""
    lines = [line.strip() for line in str(error).splitlines()]
    context = "Developer debug context: "
    met = [line.removeprefix(context) for line in lines if line.startswith(context)]
    where = [line for line in lines if line.startswith("File ")]
    return ", ".join(part for part in (lines[0] if lines else "", *met[:1], *where[-1:]) if part)


def check_options(plan: Plan) -> None:
    """Check that this machine supports the plan's compile, prefetch and async tensor parallel.

    Raises:
        PlanError: an option is not supported; names what it needs.
    """
    problems = []
    if plan.prefetch > 1 and not plan.parsed.shards_parameters:
        problems.append(
            f"prefetch {plan.prefetch} gathers sharded weights ahead, and {plan.strategy} replicates them; "
            "set parallel.prefetch to 1, or use zero2, fsdp or hsdp"
        )
    if plan.async_tp:
        needs = {
            "parallel.device=cuda": plan.device == "cuda",
            "parallel.compile=true": plan.compile,
            "a strategy with +tp": plan.dims.tp > 1,
            "parallel.sequence_parallel=true": plan.sequence_parallel,
        }
        missing = [need for need, there in needs.items() if not there]
        if missing:
            problems.append(f"async_tp needs {' and '.join(missing)}; or set parallel.async_tp to false")
    if plan.compile:
        problems += _toolchain(plan)
    if problems:
        raise PlanError(*problems)


def _toolchain(plan: Plan) -> list[str]:
    """List what this machine lacks to build kernels."""
    if plan.device == "cuda":
        from torch.utils._triton import has_triton

        return (
            [] if has_triton() else [f"compile needs Triton on GPUs, and it does not run here; install it, or {_FIX}"]
        )
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        tried = torch._inductor.config.cpp.cxx
        names = ", ".join(name for name in (tried if isinstance(tried, list | tuple) else [tried]) if name)
        return [f"compile needs a C++ compiler on CPU, and none works here (tried: {names}); install g++, or {_FIX}"]
    return []


def overlap_tensor_parallel(plan: Plan, mesh: DeviceMesh | None) -> None:
    """Let compiled blocks overlap tensor-parallel collectives with their matrix products.

    Collective.

    Sets PyTorch's process-wide switches; needs GPUs with peer-to-peer memory access.
    """
    if not plan.async_tp or mesh is None:
        return
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def check_compile(module: nn.Module, spec: ModelSpec, plan: Plan, sample: Any = None) -> None:
    """Check that each kind of block traces into one graph. No collective.

    Weights may be on the meta device.

    Raises:
        ModelError: there are no blocks, or PyTorch cannot trace one; names the line that prevents it.
    """
    if not spec.blocks:
        raise ModelError(f"compile is for repeated blocks, and the model has none; {_FIX}")
    kinds = {type(module.get_submodule(name)): name for name in reversed(spec.blocks)}
    entered: dict[str, tuple[Any, Any]] = {}

    def keep(name: str) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
            entered.setdefault(name, _pytree.tree_map_only(torch.Tensor, _without_data, (args, kwargs)))

        return hook

    handles = [
        module.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in kinds.values()
    ]
    try:
        failure = run_forward(module, *inputs_of(sample, plan.seq_len))[1]
    finally:
        for handle in handles:
            handle.remove()
    if failure:
        raise ModelError(f"compile: the model's forward cannot be traced under fake tensors ({failure}); {_FIX}")
    problems = []
    for kind, name in kinds.items():
        if name in entered:
            why = _untraceable(module.get_submodule(name), *entered[name])
            problems += [f"'{name}' ({kind.__name__}) cannot be compiled as one graph: {why}; {_FIX}"] if why else []
    if problems:
        raise ModelError(*problems)


def _untraceable(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return why ``block`` does not trace into one graph; empty if it does."""
    state = {name: _without_data(tensor) for name, tensor in (*block.named_parameters(), *block.named_buffers())}
    traced = _Traced(block)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            torch.func.functional_call(traced, {f"block.{n}": t for n, t in state.items()}, tuple(args), kwargs)
        except Exception as error:  # the tracer may raise anything for the user's code
            return why_not(error)
    return ""


class _Traced(nn.Module):
    """Run ``block``'s forward through the tracer only; no kernel is built."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.run = torch.compile(type(block).forward, fullgraph=True, backend="eager")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.block, *args, **kwargs)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
