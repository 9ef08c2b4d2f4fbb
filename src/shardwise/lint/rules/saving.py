"""Rules about checkpoints: who saves, what is in the file, who loads it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.fixes import SetKeyword, place_of
from shardwise.lint.rank_tests import perhaps_guarded, ranks_of, reached_by
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Script, argument, called_name, has_word, is_constant, keyword, owner

_SHARDED = {"fsdp1", "fsdp2"}


@rule(
    "SW401",
    "every-rank-saves",
    message="Every rank writes this file: they overwrite each other, and the file can be damaged.",
    why="All ranks run the same line with the same path; two writers of one file leave a mixture where they overlap.",
    fix="save under if dist.get_rank() == 0, and put a barrier behind it where others read the file",
)
def every_rank_saves(script: Script) -> Iterator[Fault]:
    """torch.save() to a path without the rank in it, with nothing on the way that asks for the rank."""
    if not script.is_distributed:
        return
    for call in script.torch_calls("save"):
        path = argument(call, 1, "f")
        if script.name(call.func) != "torch.save" or path is None or _names_rank(script, path):
            continue
        held = argument(call, 0, "obj")
        gathered = held is not None and any(script.wrapped(one, call) & _SHARDED for one in _models(held))
        memory = isinstance(path, ast.Name) and script.made_by(path).endswith(("BytesIO", "StringIO"))
        if not perhaps_guarded(script, call) and not memory and not gathered:
            yield script.fault(call)


def _names_rank(script: Script, path: ast.expr, depth: int = 0) -> bool:
    if has_word(ast.unparse(path), "rank", "index", "local", "shard", "process"):
        return True
    for one in ast.walk(path):
        held = script.value(one) if isinstance(one, ast.Name) else None
        if isinstance(one, ast.Name) and held is None and _is_parameter(script, one):
            return True  # nothing shows what the caller gives
        if held is not None and depth < 4 and _names_rank(script, held[0], depth + 1):
            return True
    return False


def _is_parameter(script: Script, name: ast.Name) -> bool:
    scope = script.scope(name)
    return isinstance(scope, ast.FunctionDef) and name.id in {
        one.arg for one in (*scope.args.args, *scope.args.kwonlyargs)
    }


def _models(held: ast.expr) -> list[ast.expr]:
    """Models whose state_dict() is in an expression."""
    return [
        node.func.value
        for node in ast.walk(held)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "state_dict"
    ]


@rule(
    "SW402",
    "sharded-state-on-some-ranks",
    message="Only some ranks ask for the state of a sharded model: it hangs, or holds this rank's shards alone.",
    why="""FSDP gathers parameters from all ranks in state_dict() (FSDP1), full_tensor() and get_model_state_dict();
    under fully_shard, state_dict() gives DTensors, of which a file written by one rank has one shard.""",
    fix="""call it on all ranks with full_state_dict=True and cpu_offload=True, and save on rank 0; or use dcp.save on
    all""",
)
def sharded_state_on_some_ranks(script: Script) -> Iterator[Fault]:
    """state_dict() and the like of an FSDP model under `if rank == 0`."""
    getters = {
        "get_model_state_dict",
        "get_state_dict",
        "get_optimizer_state_dict",
        "full_optim_state_dict",
        "optim_state_dict",
    }
    for call in script.calls:
        name = called_name(call)
        if name == "state_dict":
            sharded = bool(script.wrapped(owner(call), call) & _SHARDED)
        elif name in getters:
            full = script.name(call.func)
            sharded = full.startswith("torch.distributed.") or script.shards_by_accelerate(call.func)
        else:
            continue
        if sharded and reached_by(script, call):
            yield script.fault(call)


@rule(
    "SW403",
    "collective-save-on-some-ranks",
    message="Only some ranks call this save: it is a collective, and waits for the others until the timeout.",
    why="Each rank writes its own part and all agree on the metadata: every rank has to call it.",
    fix="call it on all ranks",
)
def collective_save_on_some_ranks(script: Script) -> Iterator[Fault]:
    """dcp.save, accelerator.save_state, engine.save_checkpoint, fabric.save, consolidate_state_dict on one rank."""
    for call in script.calls:
        name, full = called_name(call), script.name(call.func)
        checkpoint = full.startswith("torch.distributed.checkpoint.") and name in ("save", "load", "async_save")
        accelerate = name in ("save_state", "load_state") and script.shards_by_accelerate(call.func)
        engine = name in ("save_checkpoint", "load_checkpoint") and "deepspeed" in script.wrapped(owner(call), call)
        fabric = name == "save" and script.is_fabric(call.func)
        zero = name == "consolidate_state_dict"
        alone = is_constant(keyword(call, "no_dist"), True)
        if (checkpoint or accelerate or engine or fabric or zero) and not alone and reached_by(script, call):
            yield script.fault(call)


@rule(
    "SW404",
    "saved-names-begin-with-module",
    severity="warning",
    message="The saved names begin with 'module.': they load into a DDP model only.",
    why="The state_dict() of DistributedDataParallel is that of a module whose only child is called module.",
    fix="save model.module.state_dict()",
)
def saved_names_begin_with_module(script: Script) -> Iterator[Fault]:
    """torch.save(ddp.state_dict()) in a script that loads nothing into a DDP model and strips nothing."""
    loads = any("ddp" in script.wrapped(owner(call), call) for call in script.method_calls("load_state_dict"))
    strips = "module." in {getattr(node, "value", None) for node in script.nodes if isinstance(node, ast.Constant)}
    if loads or strips or script.mentions("consume_prefix_in_state_dict_if_present"):
        return
    for call, model in _saved_models(script):
        if "ddp" in script.wrapped(model, call):
            yield script.fault(model)


def _saved_models(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """What torch.save() and safetensors' save_file() are given: the call, and each model whose state_dict() it is."""
    for call in script.calls:
        if script.name(call.func) not in ("torch.save", "safetensors.torch.save_file") or not call.args:
            continue
        held = call.args[0]
        made = script.origin(held)
        for model in _models(made if made is not None else held):
            yield call, model


@rule(
    "SW405",
    "saved-names-begin-with-orig-mod",
    severity="warning",
    message="The saved names begin with '_orig_mod.': they load into a compiled model only.",
    why="torch.compile(model) is a module whose only child, _orig_mod, is the model; model.compile() adds no name.",
    fix="compile in place with model.compile(), or save the state of the model before torch.compile",
)
def saved_names_begin_with_orig_mod(script: Script) -> Iterator[Fault]:
    """torch.save(compiled.state_dict()) in a script that loads nothing into a compiled model and strips nothing."""
    loads = any("compile" in script.wrapped(owner(call), call) for call in script.method_calls("load_state_dict"))
    constants = [node.value for node in script.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if loads or any("_orig_mod" in one for one in constants) or script.mentions("_orig_mod"):
        return
    for call, model in _saved_models(script):
        wrapped = script.wrapped(model, call)
        if "compile" in wrapped and not wrapped & {"ddp", *_SHARDED} and _outermost_compile(script, model, call):
            yield script.fault(model)


def _outermost_compile(script: Script, model: ast.expr, at: ast.AST) -> bool:
    held = script.value(model, at)
    return held is not None and script.is_torch(held[0], "compile")


@rule(
    "SW406",
    "checkpoint-runs-code",
    severity="warning",
    message="weights_only=False lets the file run any code when it is loaded.",
    why="torch.load() then unpickles arbitrary objects; since PyTorch 2.6 the default refuses them.",
    fix="leave weights_only out and save tensors, numbers, lists and dicts; or allow classes by add_safe_globals",
)
def checkpoint_runs_code(script: Script) -> Iterator[Fault]:
    """torch.load(..., weights_only=False)."""
    for call in script.calls:
        if script.name(call.func) == "torch.load" and is_constant(keyword(call, "weights_only"), False):
            yield script.fault(call)


@rule(
    "SW407",
    "all-ranks-load-onto-gpu-0",
    message="Every rank loads this checkpoint onto the GPU that saved it: GPU 0 holds a copy for each rank.",
    why="""torch.load() puts tensors back on the device that they were saved from, cuda:0 for rank 0's, unless told
    otherwise.""",
    fix='give torch.load() map_location="cpu"',
)
def all_ranks_load_onto_gpu_0(script: Script) -> Iterator[Fault]:
    """torch.load() without map_location on all ranks, of what the same script saves from GPUs."""
    on_gpus = script.backend == "nccl" and any(script.name(call.func) == "torch.save" for call in script.calls)
    if not on_gpus or script.mentions("set_default_device"):
        return
    for call in script.calls:
        if script.name(call.func) != "torch.load" or argument(call, 1, "map_location") is not None:
            continue
        if not reached_by(script, call) and not any(one.arg is None for one in call.keywords):
            outer = script.parent.get(call)
            copied = isinstance(outer, ast.Call) and called_name(outer) == "load_state_dict"
            edit = SetKeyword(place_of(call), "map_location", '"cpu"')
            yield script.fault(call, "", *((edit,) if copied else ()))


@rule(
    "SW408",
    "read-before-it-is-written",
    message="The other ranks read this file without waiting for rank 0 to write it: it is missing, old or cut short.",
    why="Only rank 0 is in the if; the others reach torch.load() at once.",
    fix="put dist.barrier() between the save and the load",
)
def read_before_it_is_written(script: Script) -> Iterator[Fault]:
    """`if rank == 0: torch.save(x, path)`, then torch.load(path) on all ranks of the same block, nothing between."""
    for node in script.nodes if script.torch_calls("load") and script.torch_calls("save") else ():
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield from _races(script, block)


def _races(script: Script, block: list[ast.stmt]) -> Iterator[Fault]:
    written: set[str] = set()
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        calls = script.calls_in(statement)
        if isinstance(statement, ast.If) and ranks_of(script, statement.test) == "first":
            saves = [call for call in calls if script.name(call.func) == "torch.save" and len(call.args) > 1]
            written |= {ast.unparse(call.args[1]) for call in saves}
            continue
        if any(script.collective(call) or called_name(call) in ("wait_for_everyone", "barrier") for call in calls):
            written.clear()
        for call in calls:
            loads = script.name(call.func) == "torch.load" and call.args
            if loads and ast.unparse(call.args[0]) in written and not isinstance(statement, ast.If):
                yield script.fault(call)


@rule(
    "SW409",
    "zero-state-not-consolidated",
    message="ZeroRedundancyOptimizer.state_dict() raises RuntimeError: its state was not consolidated.",
    why="Each rank holds a part of the optimizer's state; consolidate_state_dict() on all ranks brings it to one.",
    fix="call optimizer.consolidate_state_dict(to=0) on all ranks before state_dict() on rank 0",
)
def zero_state_not_consolidated(script: Script) -> Iterator[Fault]:
    """state_dict() of a ZeroRedundancyOptimizer in a script without consolidate_state_dict."""
    if script.mentions("consolidate_state_dict"):
        return
    for call in script.method_calls("state_dict"):
        if script.made_by(owner(call)).endswith(".ZeroRedundancyOptimizer"):
            yield script.fault(call)
