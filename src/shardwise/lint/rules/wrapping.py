"""Rules about the order of setup: devices, process group, wrapping, optimizer, freezing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.rank_tests import rank_kind
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Script, argument, called_name, has_word, is_constant, keyword, owner
from shardwise.lint.training_calls import optimizer_steps


@rule(
    "SW501",
    "optimizer-before-sharding",
    message="The optimizer holds the parameters from before sharding: its steps change nothing that is trained.",
    why="""fully_shard() and FSDP (without use_orig_params=True) replace the model's parameters; the old ones, which
    the optimizer was given, get no gradients any more. The loss does not fall, and no error is raised.""",
    fix="create the optimizer after fully_shard() or FSDP()",
)
def optimizer_before_sharding(script: Script) -> Iterator[Fault]:
    """Optimizer(model.parameters()) above fully_shard(model) or FSDP(model) in the same function."""
    for made in script.calls:
        if not script.name(made.func).startswith("torch.optim.") or "lr_scheduler" in script.name(made.func):
            continue
        model = script.parameters_of(made.args[0]) if made.args else None
        stored = script.parent.get(made)
        if model is None or not isinstance(stored, ast.Assign) or script.wrapped(model, made) & {"fsdp1", "fsdp2"}:
            continue
        name = ast.unparse(stored.targets[0])
        steps = [
            call
            for call in optimizer_steps(script)
            if name in (ast.unparse(one) for one in (owner(call), *call.args) if one)
        ]
        for shard in script.torch_calls("fully_shard", "FullyShardedDataParallel"):
            same = (
                shard.args
                and ast.unparse(shard.args[0]) == ast.unparse(model)
                and script.scope(shard) is script.scope(made)
            )
            if (
                same
                and shard.lineno > made.lineno
                and steps
                and not script.apart(shard, made)
                and not is_constant(keyword(shard, "use_orig_params"), True)
            ):
                rebuilt = [one for one in _assignments(script, name) if one.lineno > shard.lineno]
                if not rebuilt:
                    yield script.fault(made)


def _assignments(script: Script, name: str) -> list[ast.Assign]:
    assigned = [node for node in script.nodes if isinstance(node, ast.Assign)]
    return [node for node in assigned if any(ast.unparse(one) == name for one in node.targets)]


@rule(
    "SW502",
    "frozen-after-wrapping",
    message="Parameters are frozen after DDP has wrapped the model: its reducer waits for gradients that never come.",
    why="""DDP registers every parameter that requires a gradient when it wraps the model; the next forward raises
    "Expected to have finished reduction in the prior iteration", or gradients of that bucket are never reduced.""",
    fix="freeze first, then wrap",
)
def frozen_after_wrapping(script: Script) -> Iterator[Fault]:
    """requires_grad = False on parameters of a DDP model."""
    for node, model, value in _changes_of_requires_grad(script):
        if value is False and "ddp" in _wrapping(script, model, node):
            yield script.fault(node)


@rule(
    "SW503",
    "unfrozen-after-wrapping",
    message="Parameters are unfrozen after DDP has wrapped the model: their gradients are never reduced.",
    why="""DDP knows only the parameters that required a gradient when it wrapped the model. Each rank updates the
    unfrozen ones from its own batches, and the replicas drift apart without an error.""",
    fix="unfreeze first, then wrap; wrap anew when a part is unfrozen during training",
)
def unfrozen_after_wrapping(script: Script) -> Iterator[Fault]:
    """requires_grad = True on parameters of a DDP model."""
    for node, model, value in _changes_of_requires_grad(script):
        if value is True and "ddp" in _wrapping(script, model, node):
            yield script.fault(node)


def _wrapping(script: Script, model: ast.expr, at: ast.AST) -> set[str]:
    """How the root of ``ddp.module.head`` is wrapped."""
    while isinstance(model, ast.Subscript) or (isinstance(model, ast.Attribute) and script.value(model, at) is None):
        model = model.value
    return script.wrapped(model, at)


def _changes_of_requires_grad(script: Script) -> Iterator[tuple[ast.AST, ast.expr, object]]:
    """Places that set requires_grad: the node, the module whose parameters they are, the value."""
    for node in script.nodes:
        match node:
            case ast.Assign(targets=[ast.Attribute(value=held, attr="requires_grad")], value=ast.Constant(value=value)):
                pass
            case ast.Call(func=ast.Attribute(value=held, attr="requires_grad_"), args=args):
                value = getattr(args[0], "value", None) if args else True
                inner = script.parent.get(node)
                if not isinstance(inner, ast.Expr):
                    continue
            case _:
                continue
        loop = next((one for one in script.loops(node) if isinstance(one, ast.For)), None)
        target = loop.target if loop is not None else None
        names = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)} if target is not None else set()
        if loop is not None and isinstance(held, ast.Name) and held.id in names:
            module = script.parameters_of(loop.iter)
            if module is not None:
                yield node, module, value
        elif isinstance(held, ast.Attribute) or isinstance(node, ast.Call):
            yield node, held, value


@rule(
    "SW504",
    "forward-past-ddp",
    message="The forward pass goes past DDP: this backward reduces no gradients, and the replicas drift apart.",
    why="DDP prepares the reduction in its own forward(); after model.module(...) its hooks find nothing prepared.",
    fix="call the DDP model itself",
)
def forward_past_ddp(script: Script) -> Iterator[Fault]:
    """ddp.module(x) whose result is used by a backward() of the same function."""
    for call in script.calls:
        model = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr == "forward" else call.func
        if (
            not isinstance(model, ast.Attribute)
            or model.attr != "module"
            or "ddp" not in script.wrapped(model.value, call)
        ):
            continue
        if any(_without_gradients(script, one) for one in script.above(call)):
            continue
        statement = script.statement(call)
        block = getattr(script.parent.get(statement), "body", [])
        after = [one for one in block if getattr(one, "lineno", 0) >= statement.lineno] if statement in block else []
        backward = any(script.inside(one, part) for one in script.trains for part in after)
        proper = any(
            "ddp" in script.wrapped(one.func, one)
            for one in script.calls
            if script.scope(one) is script.scope(call) and isinstance(one.func, ast.Name)
        )
        if backward and not proper:
            yield script.fault(call)


def _without_gradients(script: Script, node: ast.AST) -> bool:
    entered = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    return any(script.is_torch(one, "no_grad", "inference_mode") for one in entered)


@rule(
    "SW506",
    "batch-norm-of-small-batches",
    severity="warning",
    message="Batch norm sees the few samples of its own rank: its statistics are noisy, and differ between ranks.",
    why="""DDP does not reduce batch statistics; each rank normalises by its own batch, here of 8 samples or fewer, and
    evaluation uses rank 0's running statistics alone.""",
    fix="model = nn.SyncBatchNorm.convert_sync_batchnorm(model) before DDP",
)
def batch_norm_of_small_batches(script: Script) -> Iterator[Fault]:
    """BatchNorm in a DDP script whose training loader has batch_size <= 8, and no SyncBatchNorm."""
    norms = script.torch_calls("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    if not script.uses_ddp or not norms or script.mentions("SyncBatchNorm", "convert_sync_batchnorm"):
        return
    loaders = [call for call in script.torch_calls("DataLoader") if keyword(call, "batch_sampler") is None]
    sizes = [
        script.origin(argument(call, 1, "batch_size"))
        for call in loaders
        if "val" not in ast.unparse(script.statement(call))
    ]
    known = [one.value for one in sizes if isinstance(one, ast.Constant) and isinstance(one.value, int)]
    if sizes and len(known) == len(sizes) and max(known) <= 8:
        yield script.fault(norms[0])


@rule(
    "SW507",
    "all-ranks-on-gpu-0",
    message='Every rank uses GPU 0: NCCL stops with "Duplicate GPU detected", or the GPU is out of memory.',
    why="No line selects the rank's own GPU, and .cuda() and device 'cuda' mean the current one, 0 in each process.",
    fix='call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of a GPU',
)
def all_ranks_on_gpu_0(script: Script) -> Iterator[Fault]:
    """init_process_group("nccl") and .cuda() or .to("cuda") in a script that selects no device."""
    selected = script.mentions(
        "set_device", "device_id", "device_ids", "local_rank", "device_count", "Accelerator", "device_mesh"
    )
    numbers = any(
        "LOCAL_RANK" in one or "CUDA_VISIBLE_DEVICES" in one or one.startswith("cuda:") for one in _strings(script)
    )
    spawned = any(script.name(call.func).startswith("torch.multiprocessing.") for call in script.calls)
    if script.backend != "nccl" or selected or numbers or spawned:
        return
    for call in script.method_calls("cuda", "to"):
        plain = called_name(call) == "cuda" and not call.args and not call.keywords
        named = called_name(call) == "to" and call.args and _is_cuda(script, call.args[0])
        if plain or named:
            yield script.fault(call)
            return


def _is_cuda(script: Script, node: ast.expr) -> bool:
    made = script.origin(node)
    if isinstance(made, ast.Call) and script.is_torch(made, "device") and made.args:
        made = made.args[0]
    if isinstance(made, ast.IfExp):
        made = made.body
    return isinstance(made, ast.Constant) and made.value == "cuda"


def _strings(script: Script) -> list[str]:
    return [node.value for node in script.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@rule(
    "SW508",
    "rank-as-device",
    message="The global rank is used as the number of a GPU: on a second node there is no such device.",
    why="Ranks count over all nodes, GPUs from 0 on each: rank 8 is GPU 0 of the second node.",
    fix='use int(os.environ["LOCAL_RANK"])',
)
def rank_as_device(script: Script) -> Iterator[Fault]:
    """set_device(dist.get_rank()), device_ids=[rank], "cuda:{rank}" where rank is the global rank."""
    for node in script.nodes:
        places: list[ast.expr] = []
        match node:
            case ast.Call() if script.is_torch(node, "set_device"):
                places = node.args[:1]
            case ast.Call(func=ast.Attribute(attr="cuda"), args=[place]):
                places = [place]
            case ast.keyword(arg="device_ids", value=ast.List(elts=[place])):
                places = [place]
            case ast.JoinedStr(values=[ast.Constant(value="cuda:"), ast.FormattedValue(value=place)]):
                places = [place]
        for place in places:
            if isinstance(place, ast.JoinedStr):
                continue
            if rank_kind(script, place) == "rank" and _is_shown(script, place):
                yield script.fault(place)


def _is_shown(script: Script, place: ast.expr) -> bool:
    """Whether the script shows that this is the global rank: a parameter called rank may be the local one."""
    held: ast.expr | None = place
    for _ in range(4):
        if not isinstance(held, ast.Name | ast.Attribute):
            return True
        value = script.value(held)
        if value is None:
            return False
        held = value[0]
    return False


@rule(
    "SW509",
    "process-group-never-destroyed",
    severity="warning",
    message="The process group is never destroyed: NCCL warns at exit, and may abort or hang there.",
    why="""Since PyTorch 2.4 "destroy_process_group() was not called before program exit, which can leak resources" is
    printed; a rank that exits while others still communicate makes them fail.""",
    fix="call dist.destroy_process_group() at the end",
)
def process_group_never_destroyed(script: Script) -> Iterator[Fault]:
    """init_process_group("nccl") in a script that is run (not imported), without destroy_process_group."""
    is_run = any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test)
        for node in script.tree.body
    )
    if not is_run or script.backend != "nccl" or script.mentions("destroy_process_group"):
        return
    for call in script.torch_calls("init_process_group"):
        yield script.fault(call)


@rule(
    "SW510",
    "visible-devices-after-cuda",
    message="CUDA has started already: this CUDA_VISIBLE_DEVICES is not read any more.",
    why="The driver reads the variable once, when the process first asks it for devices; importing torch does not.",
    fix="set it before the first call that touches CUDA, or use torch.cuda.set_device()",
)
def visible_devices_after_cuda(script: Script) -> Iterator[Fault]:
    """os.environ["CUDA_VISIBLE_DEVICES"] = ... below a CUDA call of the same function."""
    starting = {
        "set_device",
        "init",
        "current_device",
        "get_device_properties",
        "get_device_name",
        "mem_get_info",
        "is_available",
    }
    for node in script.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=variables, slice=ast.Constant(value="CUDA_VISIBLE_DEVICES"))]):
                if script.name(variables) != "os.environ":
                    continue
            case _:
                continue
        before = [
            call
            for call in script.calls
            if script.scope(call) is script.scope(node)
            and call.lineno < node.lineno
            and (
                (script.name(call.func).startswith("torch.cuda.") and called_name(call) in starting)
                or (called_name(call) == "cuda" and isinstance(call.func, ast.Attribute))
            )
        ]
        if before:
            yield script.fault(node)


@rule(
    "SW511",
    "device-map-with-many-ranks",
    message='device_map="auto" spreads one model over all GPUs, and every rank does so: they collide, or DDP refuses.',
    why="It is for one process with several GPUs; with a process for each GPU, all of them place layers on all GPUs.",
    fix="leave device_map out, or give the rank's own GPU: device_map={'': local_rank}",
)
def device_map_with_many_ranks(script: Script) -> Iterator[Fault]:
    """from_pretrained(device_map="auto") in a script with DDP or an init_process_group of its own."""
    own = bool(script.torch_calls("init_process_group")) or script.uses_ddp
    for call in script.method_calls("from_pretrained"):
        given = keyword(call, "device_map")
        if (
            own
            and isinstance(given, ast.Constant)
            and given.value in ("auto", "balanced", "balanced_low_0", "sequential")
        ):
            yield script.fault(call)


@rule(
    "SW512",
    "moved-after-wrapping",
    message="The model is moved to the GPU after DDP has wrapped it on the CPU: with NCCL the wrapping itself fails.",
    why="""DDP broadcasts rank 0's parameters when it wraps the model, and NCCL has no CPU backend: "No backend type
    associated with device type cpu".""",
    fix="move the model first, then wrap it",
)
def moved_after_wrapping(script: Script) -> Iterator[Fault]:
    """DDP(model) of a model that was never moved, then ddp.to(device), with NCCL."""
    if script.backend != "nccl" or script.mentions("set_default_device", "device_map"):
        return
    for call in script.method_calls("to", "cuda"):
        model = owner(call)
        if not _to_gpu(call) or not isinstance(model, ast.Name | ast.Attribute | ast.Call):
            continue
        wrapping = script.value(model, call) if not isinstance(model, ast.Call) else (model, None, call)
        made = wrapping[0] if wrapping is not None else None
        if script.is_torch(made, "DistributedDataParallel") and isinstance(made, ast.Call) and made.args:
            inner = script.origin(made.args[0])
            text = ast.unparse(made.args[0])
            moves = [one for one in script.method_calls("to", "cuda") if one.lineno < made.lineno]
            earlier = [one for one in moves if ast.unparse(owner(one) or one) == text]
            through = any(part in ast.unparse(made.args[0]) for part in (".to(", ".cuda("))
            direct = isinstance(inner, ast.Call) and script.value(made.args[0]) is not None
            held = script.value(made.args[0])
            chained = (
                direct
                and held is not None
                and any(part in ast.unparse(held[0]) for part in (".to(", ".cuda(", "device"))
            )
            if isinstance(inner, ast.Call) and not earlier and not through and not chained:
                yield script.fault(call)


def _to_gpu(move: ast.Call) -> bool:
    return called_name(move) == "cuda" or bool(
        move.args and has_word(ast.unparse(move.args[0]), "cuda", "device", "rank")
    )


@rule(
    "SW513",
    "whole-model-on-every-gpu",
    severity="warning",
    message="The whole model is moved to the GPU before it is sharded: for a while each GPU holds all of it.",
    why="""A model that fits in shards alone is out of memory here. fully_shard() moves what it shards by itself, and
    FSDP with device_id moves one unit after the other.""",
    fix="leave the move out with fully_shard(); with FSDP, pass device_id=torch.cuda.current_device() instead",
)
def whole_model_on_every_gpu(script: Script) -> Iterator[Fault]:
    """model.to(device) above fully_shard(model) or FSDP(model) in the same function."""
    if script.backend == "gloo":
        return
    shards = [one for one in script.torch_calls("fully_shard", "FullyShardedDataParallel") if one.args]
    for move in script.method_calls("to", "cuda"):
        made = script.origin(move.args[0]) if move.args else None
        if not _to_gpu(move) or has_word(ast.unparse(made) if made else "", "cpu", "meta"):
            continue
        stored, model = script.parent.get(move), owner(move)
        names = {ast.unparse(one) for one in stored.targets} if isinstance(stored, ast.Assign) else {ast.unparse(move)}
        names |= {ast.unparse(model)} if isinstance(model, ast.Name | ast.Attribute) else set()
        same = [one for one in shards if script.scope(one) is script.scope(move)]
        if any(one.lineno < move.lineno and script.is_torch(one, "fully_shard") for one in same):
            continue  # its layers are sharded already
        if any(
            ast.unparse(one.args[0]) in names
            and one.lineno >= move.lineno
            and not script.wrapped(model, move) & {"fsdp1", "fsdp2"}
            and not script.apart(one, move)
            and "NO_SHARD" not in ast.unparse(one)
            for one in same
        ):
            yield script.fault(move)
