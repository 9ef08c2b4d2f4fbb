"""Rules about data: which rank sees which samples."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.lint.fixes import Insert, RemoveKeyword, place_of
from shardwise.lint.rank_tests import is_world_size, rank_kind
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Loop, Script, called_name, has_word, is_constant, keyword
from shardwise.lint.training_calls import loader_of, sampler_of, training_loaders

_SPLITS = (
    "DistributedSampler", "split_dataset_by_node", "shard", "BatchSampler", "batch_sampler", "get_rank", "rank",
    "process_index", "Subset", "random_split", "prepare", "setup_dataloaders", "prepare_data_loader", "Trainer",
)  # fmt: skip


@rule(
    "SW101",
    "sampler-without-set-epoch",
    message="The sampler's set_epoch() is never called: every epoch has the same order of samples.",
    why="DistributedSampler shuffles with a generator seeded by seed + epoch, and its epoch stays 0 until set_epoch().",
    fix="call sampler.set_epoch(epoch) at the start of each epoch",
)
def sampler_without_set_epoch(script: Script) -> Iterator[Fault]:
    """A shuffling DistributedSampler, a loop over epochs, and no set_epoch anywhere."""
    if script.mentions("set_epoch"):
        return
    for loop in [node for node in script.nodes if isinstance(node, ast.For)]:
        loader = loader_of(script, loop)
        made = sampler_of(script, loader) if loader else None
        outer = next(iter(script.loops(loop)), None)
        if not script.is_torch(made, "DistributedSampler") or not isinstance(made, ast.Call) or loader is None:
            continue
        if is_constant(keyword(made, "shuffle"), False) or not isinstance(outer, Loop) or _once(outer):
            continue
        given = keyword(loader, "sampler")
        edits: tuple[Insert, ...] = ()
        if isinstance(given, ast.Name) and script.scope(loader) is script.scope(loop) and isinstance(outer, ast.For):
            always = all(script.is_torch(one, "DistributedSampler") for one in script.values(given))
            counts = isinstance(outer.iter, ast.Call) and called_name(outer.iter) in ("range", "trange")
            if always and counts and isinstance(outer.target, ast.Name):
                edits = (Insert(place_of(outer.body[0]), f"{given.id}.set_epoch({outer.target.id})"),)
        yield script.fault(made, "", *edits)


def _once(loop: Loop) -> bool:
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return False
    return any(isinstance(one, ast.Constant) and one.value == 1 for one in loop.iter.args[-1:])


@rule(
    "SW102",
    "shuffle-on-every-rank",
    message="The loader shuffles the whole dataset on every rank: no rank has samples of its own.",
    why="""Each rank draws a permutation of all samples. With one seed the ranks train on the same batches and n GPUs
    do the work of one; with different seeds an epoch is world_size epochs, and samples repeat between ranks.""",
    fix="give the loader sampler=DistributedSampler(dataset) in place of shuffle=True",
)
def shuffle_on_every_rank(script: Script) -> Iterator[Fault]:
    """A DDP script that trains on a DataLoader with shuffle=True, and splits the data nowhere."""
    words = [word for word in _SPLITS if word not in ("get_rank", "rank")]
    if not script.uses_ddp or script.mentions(*words):
        return
    for loader, _, _ in training_loaders(script):
        if is_constant(keyword(loader, "shuffle"), True) and not _mentions_rank(script, loader):
            yield script.fault(loader)


def _mentions_rank(script: Script, loader: ast.Call) -> bool:
    """Whether the dataset of a loader depends on the rank."""
    made = [loader, *(script.origin(one) for one in loader.args[:1])]
    return any(_is_rank(script, part) for one in made if one is not None for part in ast.walk(one))


def _is_rank(script: Script, node: ast.AST) -> bool:
    if not isinstance(node, ast.expr):
        return False
    named = isinstance(node, ast.Name | ast.Attribute) and has_word(
        ast.unparse(node), "rank", "index", "shard", "world"
    )
    return named or bool(rank_kind(script, node))


@rule(
    "SW103",
    "random-batches-with-one-seed",
    message="Every rank draws the same random batches: the seed is the same on all of them.",
    why="""torch.manual_seed() gives all ranks the same generator, and torch.randint() picks the samples of a batch
    from it: all gradients are equal, and n ranks do the work of one.""",
    fix="seed with the rank in it: torch.manual_seed(seed + rank)",
)
def random_batches_with_one_seed(script: Script) -> Iterator[Fault]:
    """torch.randint() over the length of the data in a distributed script whose only seed has no rank in it."""
    seeds = [call for call in script.torch_calls("manual_seed", "seed_all", "manual_seed_all") if call.args]
    if not script.uses_ddp or not seeds or script.mentions("Generator", "DistributedSampler", "process_index"):
        return
    if any(_is_rank(script, part) for call in seeds for part in _seed_parts(script, call)):
        return
    for call in script.torch_calls("randint"):
        lengths = [part for one in call.args for part in ast.walk(one) if isinstance(part, ast.Call)]
        drawn = script.parent.get(call)
        name = ast.unparse(drawn.targets[0]) if isinstance(drawn, ast.Assign) else ""
        picks = name and any(
            isinstance(one, ast.Subscript | ast.ListComp | ast.Call)
            and _picks(one, name)
            and script.scope(one) in (script.scope(call), *script.above(one))
            for one in ast.walk(script.scope(call))
        )
        if any(called_name(one) == "len" for one in lengths) and picks and keyword(call, "generator") is None:
            yield script.fault(call)


def _seed_parts(script: Script, call: ast.Call) -> Iterator[ast.AST]:
    for part in ast.walk(call.args[0]):
        yield part
        for held in script.values(part) if isinstance(part, ast.Name) else ():
            yield from ast.walk(held)


def _picks(node: ast.AST, drawn: str) -> bool:
    match node:
        case ast.Subscript(slice=index):
            return ast.unparse(index) == drawn
        case ast.ListComp(generators=[first, *_]):
            return ast.unparse(first.iter) == drawn
    return False


@rule(
    "SW104",
    "ranks-with-unequal-batches",
    message="""Ranks may have one batch more than others: the last all-reduce then waits for a rank that has left the
    loop.""",
    why="""dataset[rank::world_size] gives the first ranks a sample more when the length is no multiple of world_size.
    DDP reduces gradients in each backward, and the rank with the extra batch waits in it until the timeout.""",
    fix="use DistributedSampler(drop_last=True), cut the data to a multiple of world_size, or use model.join()",
)
def ranks_with_unequal_batches(script: Script) -> Iterator[Fault]:
    """A DDP script that trains on data cut by [rank::world_size], without join or a cut to equal lengths."""
    if not script.uses_ddp or script.mentions("join", "Join", "DistributedSampler"):
        return
    cut_evenly = any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv | ast.Mod)
        and is_world_size(script, node.right)
        for node in script.nodes
    )
    if cut_evenly:
        return
    for loader, _, _ in training_loaders(script):
        data = script.origin(loader.args[0]) if loader.args else None
        for node in ast.walk(data) if data is not None else ():
            match node:
                case ast.Subscript(slice=ast.Slice(lower=ast.expr() as lower, upper=None, step=ast.expr() as step)):
                    if rank_kind(script, lower) and is_world_size(script, step):
                        yield script.fault(node)


@rule(
    "SW105",
    "worker-seed-without-rank",
    message="Data workers are seeded without the rank: worker 0 of every rank draws the same random numbers.",
    why="""DataLoader already seeds torch, random and numpy of each worker anew for each epoch. A worker_init_fn that
    seeds by the worker's number alone repeats the same augmentations on all ranks and in all epochs.""",
    fix="seed from torch.initial_seed() % 2**32 there, or leave worker_init_fn out and seed each rank differently",
)
def worker_seed_without_rank(script: Script) -> Iterator[Fault]:
    """A worker_init_fn that calls random.seed or numpy.random.seed with neither the rank nor torch's seed."""
    for call in script.torch_calls("DataLoader"):
        given = keyword(call, "worker_init_fn")
        function: ast.AST | None = given if isinstance(given, ast.Lambda) else None
        if isinstance(given, ast.Name):
            function = script.functions.get(given.id)
        if function is None or not script.is_distributed:
            continue
        for seed in script.calls_in(function):
            if script.name(seed.func) not in ("numpy.random.seed", "random.seed", "torch.manual_seed") or not seed.args:
                continue
            text = ast.unparse(function)
            if not any(
                word in text for word in ("initial_seed", "rank", "get_worker_info", "seed_all", "time", "urandom")
            ):
                yield script.fault(seed)


@rule(
    "SW106",
    "iterable-dataset-not-split",
    message="The IterableDataset gives every rank the same samples.",
    why="""A sampler cannot split an IterableDataset, and this one looks at neither the rank nor the number of ranks:
    each rank goes through all samples, and n GPUs do the work of one.""",
    fix="in __iter__, take every world_size-th sample from the rank-th one on (and so for workers of each rank)",
)
def iterable_dataset_not_split(script: Script) -> Iterator[Fault]:
    """A DDP script that trains on an IterableDataset of its own whose class mentions no rank, world or worker."""
    if not script.uses_ddp:
        return
    for loader, _, _ in training_loaders(script):
        made = script.origin(loader.args[0]) if loader.args else None
        if not isinstance(made, ast.Call) or _mentions_rank(script, loader):
            continue
        for node in script.nodes:
            if isinstance(node, ast.ClassDef) and node.name == called_name(made):
                bases = {script.name(base) for base in node.bases}
                text = ast.unparse(node)
                words = ("rank", "world", "worker", "shard", "split", "process", "rand", "seed")
                if "torch.utils.data.IterableDataset" in bases and not any(word in text.lower() for word in words):
                    yield script.fault(loader)


@rule(
    "SW107",
    "sampler-and-shuffle",
    message="DataLoader raises ValueError: a sampler and shuffle=True exclude each other.",
    why="The sampler decides the order; DistributedSampler shuffles by itself.",
    fix="leave shuffle=True out of the DataLoader",
)
def sampler_and_shuffle(script: Script) -> Iterator[Fault]:
    """DataLoader(sampler=<a sampler>, shuffle=True)."""
    for loader in script.torch_calls("DataLoader"):
        made = sampler_of(script, loader)
        if (
            made is not None
            and is_constant(keyword(loader, "shuffle"), True)
            and script.is_torch(made, "DistributedSampler")
        ):
            yield script.fault(loader, "", RemoveKeyword(place_of(loader), "shuffle"))


@rule(
    "SW108",
    "loader-not-prepared",
    message="The loader is not passed to accelerator.prepare(): every process trains on all samples.",
    why="prepare() is what gives each process its part of the batches; a plain DataLoader knows nothing of the others.",
    fix="pass the loader to accelerator.prepare() with the model and the optimizer",
)
def loader_not_prepared(script: Script) -> Iterator[Fault]:
    """A loop with accelerator.backward() over a plain DataLoader, where the model is prepared."""
    prepared = [call for call in script.method_calls("prepare") if script.is_accelerator(call.func)]
    if not prepared or script.mentions("prepare_data_loader", "DistributedSampler", "split_between_processes"):
        return
    if any(isinstance(one, ast.Starred) for call in prepared for one in call.args):
        return
    for _, loop, backward in training_loaders(script):
        if script.is_accelerator(backward.func):
            yield script.fault(loop.iter)
