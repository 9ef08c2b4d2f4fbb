"""Rules about collectives: all ranks of a group call them, in the same order, or they wait."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.rank_tests import guard, rank_kind, ranks_of, reached_by, tests_above
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Function, Loop, Script, argument, called_name, keyword, owner
from shardwise.lint.training_calls import optimizer_steps

_ACCELERATE = {"wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes", "broadcast"}
_FABRIC = {"barrier", "all_gather", "all_reduce", "broadcast"}


def _collective(script: Script, call: ast.Call) -> str:
    """The name of a collective of torch.distributed, of an Accelerator or of a Fabric; else empty."""
    name = called_name(call)
    if script.collective(call):
        return script.collective(call)
    if name in _ACCELERATE and script.is_accelerator(call.func):
        return name
    return name if name in _FABRIC and script.is_fabric(call.func) else ""


_GROUP_PLACES = {
    **dict.fromkeys(["barrier", "monitored_barrier"], 0),
    **dict.fromkeys(["all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"], 2),
    **dict.fromkeys(["broadcast", "broadcast_object_list"], 2),
    **dict.fromkeys(["gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"], 3),
}
"""Where torch.distributed takes the group of a collective."""


def _has_group(script: Script, call: ast.Call) -> bool:
    """Whether a collective is of a group of its own."""
    place = _GROUP_PLACES.get(script.collective(call))
    return (argument(call, place, "group") if place is not None else keyword(call, "group")) is not None


def _partial(script: Script, wanted: set[str] | None, unwanted: set[str]) -> Iterator[ast.Call]:
    """Collectives of the whole world that only some ranks reach, and the others have no such call for."""
    calls = [(call, name) for call in script.calls if (name := _collective(script, call))]
    for call, name in calls:
        if name in unwanted or (wanted is not None and name not in wanted) or _has_group(script, call):
            continue
        ranks = reached_by(script, call)
        opposite = "others" if ranks == "first" else "first"
        others = [one for one, its in calls if its == name and one is not call and reached_by(script, one) == opposite]
        if ranks and not others and not any(its == name and _answers(script, call, one) for one, its in calls):
            yield call


def _answers(script: Script, call: ast.Call, other: ast.Call) -> bool:
    """Whether ``other`` may be the call of the ranks that ``call`` leaves out: a test of the rank leads there too."""
    if other is call or script.scope(other) is not script.scope(call):
        return False
    tests = [test for test, _ in tests_above(script, call)]
    apart = [
        (test, answer) for test, answer in tests_above(script, other) if (test, answer) not in tests_above(script, call)
    ]
    return any("rank" in ast.unparse(test) or test in tests for test, _ in apart)


@rule(
    "SW301",
    "collective-on-some-ranks",
    message="Only some ranks reach this collective: it waits for the others until the timeout.",
    why="""A collective ends when every rank of the group has called it. Rank 0 waits here; the other ranks go on, and
    their next collective pairs with this one or waits too.""",
    fix="call it on all ranks, and keep only the printing or saving in the if",
)
def collective_on_some_ranks(script: Script) -> Iterator[Fault]:
    """A collective under `if rank == 0` without one of its kind on the other ranks."""
    for call in _partial(script, None, {"barrier", "monitored_barrier", "wait_for_everyone", "new_group"}):
        yield script.fault(call)


@rule(
    "SW302",
    "barrier-on-some-ranks",
    message="Only some ranks reach this barrier: they wait there until the timeout.",
    why="A barrier ends when every rank has reached it.",
    fix="move the barrier out of the if",
)
def barrier_on_some_ranks(script: Script) -> Iterator[Fault]:
    """A barrier under `if rank == 0` without one for the other ranks."""
    for call in _partial(script, {"barrier", "monitored_barrier", "wait_for_everyone"}, set()):
        yield script.fault(call)


@rule(
    "SW303",
    "collective-after-an-error",
    message="After an error on one rank this collective waits for ranks that are elsewhere.",
    why="""The rank that raised comes here; the others are in a collective of the training loop. Both wait until the
    timeout, and the error is printed after that or never.""",
    fix="leave collectives out of except and finally; let the process end, and torchrun stops the others",
)
def collective_after_an_error(script: Script) -> Iterator[Fault]:
    """A collective in `except` or `finally` of a try whose body has collectives of its own, or trains."""
    for call in script.calls:
        name = _collective(script, call)
        if not name or _has_group(script, call):
            continue
        child: ast.AST = call
        for one in script.above(call):
            if isinstance(one, Function):
                break
            if isinstance(one, ast.Try) and (child in one.finalbody or child in one.handlers):
                tried = script.calls_in(one.body[0]) if len(one.body) == 1 else []
                if any(_collective(script, part) for part in tried) and child not in one.finalbody:
                    break  # another way to do what has just failed on every rank
                imports = {script.name(handler.type).rpartition(".")[2] for handler in one.handlers if handler.type}
                if not imports & {"ImportError", "ModuleNotFoundError", "AttributeError"} or child in one.finalbody:
                    yield script.fault(call)
                break
            child = one


@rule(
    "SW304",
    "forward-of-a-sharded-model-on-some-ranks",
    message="Only some ranks run this forward pass, and a sharded model gathers its parameters in it: it hangs.",
    why="FSDP all-gathers each unit's parameters from all ranks in forward(), in evaluation too.",
    fix="evaluate on all ranks, and print on one",
)
def sharded_forward_on_some_ranks(script: Script) -> Iterator[Fault]:
    """model(...) or model.generate(...) under `if rank == 0` for an FSDP model."""
    for call, wrapped in _forwards(script):
        if wrapped & {"fsdp1", "fsdp2"} and reached_by(script, call):
            yield script.fault(call)


@rule(
    "SW305",
    "forward-with-buffers-on-some-ranks",
    message="Only some ranks run this forward pass, and DDP broadcasts the model's buffers in it: it hangs.",
    why="""Where a model has buffers (batch norm), DDP's forward begins with a broadcast from rank 0, in evaluation
    too, and waits for ranks that do not take part.""",
    fix="evaluate model.module there, or evaluate on all ranks",
)
def ddp_forward_on_some_ranks(script: Script) -> Iterator[Fault]:
    """model(...) under `if rank == 0` for a DDP model, in a script that builds batch norm."""
    names = {script.name(call.func).rpartition(".")[2] for call in script.calls}
    buffers = names & {
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "SyncBatchNorm",
        "convert_sync_batchnorm",
        "register_buffer",
    }
    resnet = any(script.name(call.func).startswith("torchvision.models.resnet") for call in script.calls)
    off = any(getattr(keyword(call, "broadcast_buffers"), "value", True) is False for call in script.calls)
    if not (buffers or resnet) or off:
        return
    for call, wrapped in _forwards(script):
        if wrapped >= {"ddp"} and reached_by(script, call):
            yield script.fault(call)


def _forwards(script: Script) -> Iterator[tuple[ast.Call, set[str]]]:
    """Calls of models that the script wraps."""
    for call in script.calls if script.wraps else ():
        model = call.func
        if isinstance(model, ast.Attribute) and model.attr in ("generate", "forward"):
            model = model.value
        if isinstance(model, ast.Name | ast.Attribute) and called_name(call) not in script.functions:
            wrapped = script.wrapped(model, call)
            if wrapped:
                yield call, wrapped


@rule(
    "SW306",
    "cpu-tensor-with-nccl",
    message="NCCL reduces tensors on GPUs only: this one is on the CPU, and the call raises RuntimeError.",
    why="""No CPU backend is registered with init_process_group("nccl"): "No backend type associated with device type
    cpu".""",
    fix='create the tensor with device="cuda", or initialise with "cpu:gloo,cuda:nccl"',
)
def cpu_tensor_with_nccl(script: Script) -> Iterator[Fault]:
    """A collective of torch.tensor(...) without a device, with the backend nccl."""
    if script.backend != "nccl" or script.mentions("set_default_device", "set_default_tensor_type", "new_group"):
        return
    for call in script.calls:
        if script.collective(call) not in ("all_reduce", "broadcast", "reduce") or not call.args:
            continue
        given = call.args[0]
        held = script.value(given)
        made = held[0] if held is not None and held[1] is None else given
        new = script.is_torch(made, "tensor", "zeros", "ones", "empty", "full", "rand", "randn")
        if new and isinstance(made, ast.Call) and keyword(made, "device") is None:
            yield script.fault(call)


@rule(
    "SW307",
    "rank-before-the-process-group",
    message="The process group does not exist yet: this raises ValueError.",
    why='"Default process group has not been initialized": get_rank() and collectives need init_process_group() first.',
    fix="call init_process_group() first, or read RANK from the environment",
)
def rank_before_the_group(script: Script) -> Iterator[Fault]:
    """dist.get_rank() or a collective above init_process_group() in the same block."""
    for init in script.torch_calls("init_process_group"):
        statement = script.statement(init)
        block = next(
            (
                body
                for field in ("body", "orelse", "finalbody")
                if isinstance(body := getattr(script.parent[statement], field, None), list) and statement in body
            ),
            [],
        )
        if script.mentions("is_initialized", "Accelerator", "PartialState") or guard(script, init)[1] is not None:
            continue
        for before in block[: block.index(statement)] if statement in block else []:
            if isinstance(before, Function | ast.ClassDef):
                continue
            for call in script.calls_in(before):
                name = script.name(call.func)
                if name in ("torch.distributed.get_rank", "torch.distributed.get_world_size") or script.collective(
                    call
                ):
                    yield script.fault(call)


@rule(
    "SW308",
    "group-built-on-some-ranks",
    message="Only some ranks call new_group(): the next group that all of them build never meets, and hangs.",
    why="""new_group() is to be called by all ranks, members or not: groups are numbered in the order of the calls, and
    a rank that left one out looks for the next group under another number.""",
    fix="call new_group() on every rank, and use the group only on its members",
)
def group_on_some_ranks(script: Script) -> Iterator[Fault]:
    """new_group() under a test of the rank."""
    for call in script.calls:
        if script.collective(call) != "new_group" or keyword(call, "use_local_synchronization") is not None:
            continue
        for one in script.above(call):
            if isinstance(one, Function):
                break
            if isinstance(one, ast.If) and any(
                isinstance(part, ast.Compare) and rank_kind(script, part.left) == "rank" for part in ast.walk(one.test)
            ):
                if not any(
                    script.collective(other) == "new_group" for part in one.orelse for other in script.calls_in(part)
                ):
                    yield script.fault(call)
                break


@rule(
    "SW309",
    "one-rank-leaves-the-loop",
    message="Only some ranks leave the training loop here: the others wait in the next backward until the timeout.",
    why="The decision is taken on one rank and the others do not hear of it; DDP's next all-reduce lacks a rank.",
    fix="broadcast the decision to all ranks, and let all of them leave",
)
def one_rank_leaves(script: Script) -> Iterator[Fault]:
    """break or return under `if rank == 0` in a loop that trains a DDP or FSDP model."""
    if not script.is_distributed:
        return
    trains = [script.loops(backward) for backward in script.trains]
    for node in script.nodes:
        if not isinstance(node, ast.Break | ast.Return) or not script.loops(node):
            continue
        loop = script.loops(node)[0]
        tests = [one for one in script.above(node) if isinstance(one, ast.If) and script.inside(one, loop)]
        partial = any(
            ranks_of(script, one.test) and any(script.inside(node, part) for part in one.body) for one in tests
        )
        if partial and any(loop in loops for loops in trains) and isinstance(loop, Loop):
            yield script.fault(node)


@rule(
    "SW310",
    "step-on-some-ranks",
    message="Only some ranks update their weights: the others keep the old ones, and the replicas drift apart.",
    why="DDP averages gradients, not weights: every rank has to take the same step.",
    fix="step on all ranks",
)
def step_on_some_ranks(script: Script) -> Iterator[Fault]:
    """optimizer.step() under `if rank == 0`."""
    for step in optimizer_steps(script):
        if script.is_distributed and reached_by(script, step):
            yield script.fault(step)


@rule(
    "SW311",
    "weights-loaded-on-some-ranks",
    message="Only some ranks load these weights, after DDP has copied rank 0's: the replicas differ from now on.",
    why="DDP broadcasts rank 0's parameters once, when the model is wrapped, and only gradients after that.",
    fix="load on all ranks, or on rank 0 before the model is wrapped",
)
def weights_loaded_on_some_ranks(script: Script) -> Iterator[Fault]:
    """ddp.load_state_dict() or ddp.module.load_state_dict() under `if rank == 0`, and no broadcast."""
    if any(script.collective(call) == "broadcast" for call in script.calls):
        return
    for call in script.method_calls("load_state_dict"):
        model = owner(call)
        if isinstance(model, ast.Attribute) and model.attr == "module":
            model = model.value
        if "ddp" in script.wrapped(model, call) and reached_by(script, call):
            yield script.fault(call)


@rule(
    "SW312",
    "reduced-value-read-on-all-ranks",
    message="""gather() and reduce() fill their result on the destination rank only; the others read what was there
    before.""",
    why="The tensor of dist.reduce() is undefined on all ranks but dst.",
    fix="use all_reduce(), or read the result on the destination rank only",
)
def reduce_read_everywhere(script: Script) -> Iterator[Fault]:
    """dist.reduce(x, dst=0), then x.item() on all ranks that decides about the loop."""
    for call in script.calls:
        if script.collective(call) != "reduce" or not call.args or not isinstance(call.args[0], ast.Name):
            continue
        name, destination = call.args[0].id, argument(call, 1, "dst")
        if destination is None or guard(script, call)[0]:
            continue
        for test in ast.walk(script.scope(call)):
            if (
                isinstance(test, ast.If)
                and test.lineno > call.lineno
                and isinstance(test.body[-1], ast.Break | ast.Return)
            ):
                read = [
                    one
                    for one in script.calls_in(test.test)
                    if called_name(one) == "item" and ast.unparse(owner(one) or one) == name
                ]
                if read and not guard(script, read[0])[0]:
                    yield script.fault(read[0])


_HARMLESS = {
    "append", "collect", "debug", "empty_cache", "error", "exception", "info", "isinstance", "print", "repr", "str",
    "warn", "warning", "write", "zero_grad",
}  # fmt: skip
"""What an exception handler may call without ending or synchronising anything."""


def _agrees(script: Script, call: ast.Call) -> bool:
    """Whether ranks may agree on something in ``call``."""
    name = called_name(call)
    return bool(script.collective(call)) or any(
        word in name for word in ("reduce", "gather", "sync", "broadcast", "agree")
    )


@rule(
    "SW313",
    "some-ranks-skip-backward",
    message="A rank that skips its backward() leaves the others waiting in DDP's all-reduce until the timeout.",
    why="""Whether this loss is finite differs between ranks, and every backward of a DDP model is a collective: the
    ranks that go on pair their reduction with another step's, or wait.""",
    fix="agree first: all_reduce the flag over ranks, and skip on all of them or on none",
)
def some_ranks_skip_backward(script: Script) -> Iterator[Fault]:
    """`if isnan(loss): continue` before backward() in a loop that trains a DDP model, with no collective about it."""
    if not script.uses_ddp:
        return
    for backward in script.trains:
        loops = script.loops(backward)
        if not loops or any(_agrees(script, call) for call in script.calls_in(loops[0])):
            continue
        for node in ast.walk(loops[0]):
            checks = (
                [call for call in script.calls_in(node.test) if called_name(call) in ("isnan", "isfinite", "isinf")]
                if isinstance(node, ast.If)
                else []
            )
            leaves = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Continue | ast.Break | ast.Return)
            if checks and leaves and node.lineno < backward.lineno and script.loops(node)[:1] == loops[:1]:  # type: ignore[attr-defined]
                yield script.fault(node)


@rule(
    "SW314",
    "exception-skips-backward",
    message="A rank that catches an error and goes on leaves the others waiting in DDP's all-reduce until the timeout.",
    why="""Out of memory, say, happens on one rank; after `except` it goes to the next batch while the others wait for
    its gradients. All reductions after that pair different steps, or hang.""",
    fix="let the error end the process (torchrun restarts all ranks), or agree on the skip with an all_reduce",
)
def exception_skips_backward(script: Script) -> Iterator[Fault]:
    """try: ... backward() ... except: without raise, in a loop that trains a DDP model."""
    if not script.uses_ddp:
        return
    for backward in script.trains:
        for one in script.above(backward):
            if isinstance(one, Loop | ast.FunctionDef):
                break
            if (
                not isinstance(one, ast.Try)
                or not script.loops(one)
                or not any(script.inside(backward, part) for part in one.body)
            ):
                continue
            for handler in one.handlers:
                ends = any(isinstance(part, ast.Raise | ast.Break | ast.Return) for part in ast.walk(handler))
                ends = ends or not all(called_name(call) in _HARMLESS for call in script.calls_in(handler))
                interrupt = "Interrupt" in ast.unparse(handler.type) if handler.type else False
                if not ends and not interrupt:
                    yield script.fault(handler)
