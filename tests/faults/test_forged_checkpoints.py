"""Checkpoints that lie, with hashes that are right: refused in one sentence, or read as they were; never a hang."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import nn

from shardwise.checkpoint import commit
from shardwise.checkpoint.commit import FolderLock
from shardwise.checkpoint.convert.conversion import Extras, convert
from shardwise.checkpoint.convert.merge_lora import MergedSource, SavedAdapters
from shardwise.checkpoint.format import LATEST, MANIFEST, newest, read_manifest
from shardwise.checkpoint.inspect import inspect_checkpoint
from shardwise.checkpoint.integrity import verify_checkpoint
from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.load import load_checkpoint, rng_for
from shardwise.checkpoint.matching import select
from shardwise.checkpoint.readers.detect import open_source
from shardwise.checkpoint.readers.huggingface import HuggingFaceSource
from shardwise.checkpoint.readers.live import LiveSource
from shardwise.checkpoint.readers.shardwise_reader import OwnSource
from shardwise.checkpoint.save import Saver
from shardwise.checkpoint.weights import BaseWeights, load_weights
from shardwise.cli.checkpoint import run_convert
from shardwise.errors import CheckpointError, ModelError, ShardwiseError, UserError
from shardwise.plan.lora_options import AdapterOptions
from shardwise.plan.plan import Plan
from shardwise.train.resume import reading_state
from tests.checkpoints import write_checkpoint
from tests.cli import configs
from tests.models import byte_decoder
from tests.worlds import run_world

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
EMBED = "model/embed.weight"
MUTATIONS = 800


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the manifest and give it the hash that belongs to it."""
    document = json.loads((path / MANIFEST).read_bytes())
    change(document)
    return forge_text(path, document)


def forge_text(path: Path, document: Any) -> Path:
    if isinstance(document, dict):
        document["hash"] = "xxh3-128:" + "0" * 32
        text = json.dumps(document)
        made = xxhash.xxh3_128(text.encode()).hexdigest()
        text = text.replace("0" * 32, made, 1)
    else:
        text = json.dumps(document)
    (path / MANIFEST).write_text(text)
    return path


def all_readers(path: Path, target: Path, rank: int = 0) -> list[str]:
    """What each reader says of a checkpoint; every one of them must refuse it, with an error of ours."""
    said = [str(damage) for damage in (*inspect_checkpoint(path).damage, *verify_checkpoint(path).damage)]
    for read in (
        lambda: run_convert(
            str(path),
            str(target),
            to="shardwise",
            dtype=None,
            max_shard_size=None,
            model=None,
            verify=False,
            optimizer=True,
            as_json=False,
        ),
        lambda: load_checkpoint(path, model=nn.Linear(1, 1), optimizer=None),
        lambda: load_weights(nn.Linear(1, 1), path),
        lambda: rng_for(path, rank),
    ):
        with pytest.raises(ShardwiseError) as caught:
            read()
        said.append(str(caught.value))
    assert not target.exists() and not list(target.parent.glob(".tmp-*"))
    return said


def entry(document: dict[str, Any], name: str = EMBED) -> dict[str, Any]:
    found: dict[str, Any] = document["tensors"][name]
    return found


def overlapping(document: dict[str, Any]) -> None:
    first, second = entry(document)["shards"]
    second["offsets"] = first["offsets"]


def the_same_twice(document: dict[str, Any]) -> None:
    entry(document)["shards"][1] = entry(document)["shards"][0]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (overlapping, "shards overlap"),
    "twice": (the_same_twice, "shards overlap"),
    "hole": (lambda d: entry(d)["shards"].pop(), "contain 14 of 28 elements"),
    "negative shape": (lambda d: entry(d).update(shape=[-7, -4]), "greater than or equal to 0"),
    "negative and empty": (lambda d: entry(d).update(shape=[-7, 0], shards=[]), "greater than or equal to 0"),
    "huge": (lambda d: entry(d).update(shape=[0, 1 << 70], shards=[]), "less than"),
    "huge number": (lambda d: d.update(step=10**4000), "less than"),
    "nan": (lambda d: entry(d).update(shape=[float("nan"), 4]), "finite number"),
    "infinity": (lambda d: d.update(ranks=float("inf")), "finite number"),
    "parent": (lambda d: entry(d)["shards"][0].update(file=".."), "not a plain file name"),
    "outside": (lambda d: entry(d)["shards"][0].update(file=f"../{FIRST}"), "not a plain file name"),
    "absolute": (lambda d: entry(d)["shards"][0].update(file="/etc/passwd"), "not a plain file name"),
    "zero byte": (lambda d: entry(d)["shards"][0].update(file="a\0b"), "not a plain file name"),
    "surrogate": (lambda d: entry(d)["shards"][0].update(file="\ud800"), "surrogates not allowed"),
    "surrogate in a name": (lambda d: d["tensors"].update({"model/\udfff": entry(d)}), "surrogates not allowed"),
    "surrogate in state": (lambda d: d["state"].update(a="\ud800"), "surrogates not allowed"),
    "nested": (lambda d: d["state"].update(json.loads('{"a":' * 300 + "1" + "}" * 300)), "nests deeper"),
    "list": (lambda d: d.update(tensors=[]), "valid dictionary"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused_by_every_reader(tmp_path: Path, name: str) -> None:
    change, reason = FORGERIES[name]
    path = forge(write_checkpoint(tmp_path / "run"), change)
    for said in all_readers(path, tmp_path / "out"):
        assert reason in said, said
        assert len(said) < 1500


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"a":' * 100_000, "recursion"),
        (b'{"step": ' + b"9" * 6000 + b"}", "integer string conversion"),
        (b'{"schema": 2, "schema": 1}', "the key 'schema' is there twice"),
        (b'{"schema": 1' + b"0" * 4000 + b"}", "has schema 100000000000, and"),
        ('{"a": "\ud800"}'.encode("utf-8", "surrogatepass"), "can't decode"),
        ("{}".encode("utf-16"), "can't decode"),
        (b"NaN", "valid dictionary"),
        (b"0", "valid dictionary"),
    ],
    ids=["lists", "objects", "integer", "twice", "schema", "raw surrogate", "utf-16", "nan", "number"],
)
def test_a_manifest_that_is_no_plain_json(tmp_path: Path, raw: bytes, reason: str) -> None:
    path = write_checkpoint(tmp_path / "run")
    (path / MANIFEST).write_bytes(raw)
    for said in all_readers(path, tmp_path / "out"):
        assert reason in said and len(said) < 800, said


def test_a_key_that_is_there_twice_deep_inside(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "run")
    text = (path / MANIFEST).read_text().replace('"dtype":"F32"', '"dtype":"F32","dtype":"I32"', 1)
    digits = text.index("xxh3-128:") + 9
    text = text[:digits] + "0" * 32 + text[digits + 32 :]
    made = xxhash.xxh3_128(text.encode()).hexdigest()
    (path / MANIFEST).write_text(text[:digits] + made + text[digits + 32 :])
    assert all("the key 'dtype' is there twice" in said for said in all_readers(path, tmp_path / "out"))


def fifo(file: Path) -> None:
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.mkdir()


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def loop(file: Path) -> None:
    file.symlink_to(file.name)


def dangling(file: Path) -> None:
    file.symlink_to("nowhere")


def pipe_behind_a_link(file: Path) -> None:
    os.mkfifo(file.with_name("pipe"))
    file.symlink_to("pipe")


def giant(file: Path) -> None:
    with file.open("wb") as made:
        made.truncate(1 << 30)


KINDS = (fifo, folder, device, loop, dangling, pipe_behind_a_link, giant)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", [MANIFEST, SECOND, LATEST])
def test_what_is_no_file(tmp_path: Path, file: str, kind: Callable[[Path], None]) -> None:
    path = write_checkpoint(tmp_path / "run")
    swapped = path / file if file != LATEST else tmp_path / "run" / LATEST
    swapped.unlink()
    kind(swapped)
    if file == LATEST:
        assert newest(tmp_path / "run") == path
        return
    started = time.monotonic()
    if file == MANIFEST:
        with pytest.raises(CheckpointError, match="has no manifest") as caught:
            read_manifest(path)
        assert str(path) in str(caught.value)
    else:
        with pytest.raises(CheckpointError, match=SECOND), OwnSource(path) as source:
            source.read(EMBED, Box((0, 0), (7, 4)))
    all_readers(path, tmp_path / "out", rank=1)
    assert time.monotonic() - started < 10


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "model.safetensors"],
        ["model.safetensors.index.json"],
        [".metadata"],
        ["latest", "global_step1/x"],
    ],
    ids=lambda names: names[0],
)
def test_pipes_in_the_folders_of_other_tools(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    with pytest.raises(ShardwiseError), open_source(tmp_path) as source:
        for name, info in source.tensors.items():
            source.read(name, info.full)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(path: Path, text: bytes, content: bytes, size: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + content)


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "behind the end": lambda h: h["b"].update(data_offsets=[16, 1 << 40], shape=[1 << 37]),
    "before the beginning": lambda h: h["b"].update(data_offsets=[-16, 0]),
    "backwards": lambda h: h["b"].update(data_offsets=[32, 16]),
    "overlapping": lambda h: h["b"].update(data_offsets=[8, 24]),
    "the same": lambda h: h["b"].update(data_offsets=[0, 16]),
    "floats": lambda h: h["b"].update(data_offsets=[16.0, 32.0]),
    "float shape": lambda h: h["b"].update(shape=[2.0, 2.0]),
    "negative shape": lambda h: h["b"].update(shape=[-2, -2]),
    "true": lambda h: h["b"].update(shape=[True, 4]),
    "huge": lambda h: h["b"].update(shape=[0, 1 << 70], data_offsets=[16, 16]),
    "text": lambda h: h["b"].update(shape=["2", 2]),
    "lists": lambda h: h["b"].update(shape=[[2], 2]),
    "dtype": lambda h: h["b"].update(dtype="F33"),
    "dtype list": lambda h: h["b"].update(dtype=["F32"]),
    "three offsets": lambda h: h["b"].update(data_offsets=[16, 32, 48]),
    "no entry": lambda h: h.update(b=None),
    "surrogate": lambda h: h.update({"\ud800": h.pop("b")}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_header_that_lies(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(2, 2)}, file)
    header, content = header_of(file)
    HEADERS[name](header)
    with_header(file, json.dumps(header).encode(), content)
    with pytest.raises(CheckpointError, match=r"model.safetensors' is damaged"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1, 99_999_999, 1 << 40])
def test_a_header_that_is_said_to_be_huge(tmp_path: Path, size: int) -> None:
    with_header(tmp_path / "model.safetensors", b"{}", b"", size)
    with pytest.raises(CheckpointError, match="the header claims to have"):
        HuggingFaceSource(tmp_path)


def test_a_header_with_a_key_twice_or_too_deep(tmp_path: Path) -> None:
    one = b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    for text in (b"{%s, %s}" % (one, one), b"[" * 100_000, b'{"a": ' * 5000):
        with_header(tmp_path / "model.safetensors", text, b"x")
        with pytest.raises(CheckpointError, match=r"model.safetensors' is damaged"):
            HuggingFaceSource(tmp_path)


def test_a_dtype_of_the_same_width_is_not_read_as_another(tmp_path: Path) -> None:
    """Floats read as integers would be numbers that nobody saved."""
    path = forge(write_checkpoint(tmp_path / "run"), lambda d: entry(d).update(dtype="I32"))
    with OwnSource(path) as source, pytest.raises(CheckpointError, match=f"{EMBED} is F32, not I32"):
        source.read(EMBED, Box((0, 0), (7, 4)))
    assert any("is F32, not I32" in str(damage) for damage in verify_checkpoint(path).damage)


def test_room_is_not_made_for_what_only_the_manifest_says(tmp_path: Path) -> None:
    def grow(document: dict[str, Any]) -> None:
        huge = entry(document, "rng/0/cpu")
        huge["shape"] = huge["shards"][0]["lengths"] = [1 << 50]

    path = forge(write_checkpoint(tmp_path / "run"), grow)
    with pytest.raises(CheckpointError, match="rng/0/cpu is"):
        rng_for(path, 0)
    with OwnSource(path) as source, pytest.raises(CheckpointError, match="rng/0/cpu is"):
        source.read("rng/0/cpu", Box((0,), (1 << 50,)))


# what is made by chance


class Two(nn.Module):
    """A model whose checkpoint has cut, whole, 0-d, empty and tied tensors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
        with torch.no_grad():
            self.embed.weight.copy_(torch.randn(6, 4, generator=generator))


def two() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    (model.embed.weight.sum() * model.scale).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that was saved, one of whose tensors is then cut into two files."""
    root = tmp_path_factory.mktemp("original") / "checkpoints"
    model, optimizer = two()
    rng = {"cpu": torch.arange(9, dtype=torch.uint8)}
    with Saver(root, keep=2, async_save=False) as saver:
        path = saver.save(7, model=model, optimizer=optimizer, plan=Plan(), state={"tokens": 3}, rng=rng)
    rows = model.embed.weight.detach()
    cut = {"model/embed.weight": rows[4:].contiguous()}
    save_file(cut, path / SECOND)
    save_file({"model/embed.weight": rows[:4].contiguous()}, path / "rank-00002.safetensors")

    def change(document: dict[str, Any]) -> None:
        def shard(file: str, begin: int, part: torch.Tensor) -> dict[str, Any]:
            made = xxhash.xxh3_128(part.contiguous().numpy().tobytes()).hexdigest()
            where = {"offsets": [begin, 0], "lengths": list(part.shape)}
            return {"file": file, "key": EMBED, **where, "hash": f"xxh3-128:{made}"}

        shards = [shard("rank-00002.safetensors", 0, rows[:4]), shard(SECOND, 4, rows[4:])]
        document["tensors"][EMBED]["shards"] = shards

    return forge(path, change)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


ODD: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), "", "x", "\ud800"]
ODD += ["..", "../x", "/etc/passwd", [], [[]], {}, {"": None}, [1, 2, 3], "I32", "F64", "xxh3-128:00", "blake", "\0"]


def by_number(rng_state: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return rng_state.choice(ODD)
    return rng_state.choice([value + 1, value - 1, -value, value * 2, value // 2, value + 0.5, str(value), [value]])


def mutate_document(rng_state: random.Random, document: Any) -> str:
    """One change somewhere in a manifest; what it was."""
    at = rng_state.choice(list(places(document)))
    holder = document
    for key in at[:-1]:
        holder = holder[key]
    kind = rng_state.choice(["delete", "odd", "number", "twice", "rename"])
    if kind == "delete":
        del holder[at[-1]]
    elif kind == "twice" and isinstance(holder, list):
        holder.append(holder[at[-1]])
    elif kind == "rename" and isinstance(holder, dict):
        holder[rng_state.choice(["", "x", f"{at[-1]}x", "model/x", "\udc80"])] = holder.pop(at[-1])
    else:
        holder[at[-1]] = by_number(rng_state, holder[at[-1]]) if kind == "number" else rng_state.choice(ODD)
    return f"{kind} {at}"


def mutate(rng_state: random.Random, path: Path) -> str:
    """One change somewhere in a checkpoint's folder; what it was."""
    file = rng_state.choice([MANIFEST, FIRST, SECOND, "rank-00002.safetensors"])
    kind = rng_state.choice(["forged", "forged", "forged", "header", "bytes", "cut", "swap", "kind"])
    if kind == "forged":
        document = json.loads((path / MANIFEST).read_bytes())
        said = [mutate_document(rng_state, document)]
        forge_text(path, document)
        return f"forged: {said}"
    if kind == "header" and file != MANIFEST:
        header, content = header_of(path / file)
        said = [mutate_document(rng_state, header)]
        with_header(path / file, json.dumps(header).encode(), content)
        return f"header of {file}: {said}"
    data = bytearray((path / file).read_bytes())
    if kind == "swap":
        other = rng_state.choice([MANIFEST, FIRST, SECOND, "rank-00002.safetensors"])
        (path / file).write_bytes((path / other).read_bytes())
        return f"{file} is {other}"
    if kind == "kind":
        made = rng_state.choice([one for one in KINDS if one is not giant])
        (path / file).unlink()
        made(path / file)
        return f"{file} is a {made.__name__}"
    if kind == "cut":
        keep = rng_state.randrange(len(data))
        (path / file).write_bytes(data[:keep])
        return f"{file} ends at {keep}"
    for _ in range(rng_state.choice([1, 1, 4])):
        data[rng_state.randrange(len(data))] ^= 1 << rng_state.randrange(8)
    (path / file).write_bytes(data)
    return f"bits of {file}"


def values_of(path: Path) -> dict[str, torch.Tensor]:
    with OwnSource(path) as source:
        source.check()
        return {name: source.read(name, info.full) for name, info in source.tensors.items()}


class Silent:
    """Nobody looks at the progress."""

    def begin(self, what: str, num_bytes: int) -> None: ...

    def tick(self, num_bytes: int) -> None: ...


def converted(path: Path, target: Path) -> dict[str, torch.Tensor]:
    with OwnSource(path) as source:
        source.check()
        selection = select(source, None, dtype=None, weights_only=False, reason="")
        options: dict[str, Any] = {
            "to": "shardwise",
            "max_shard_bytes": 1 << 20,
            "extras": Extras(),
            "progress": Silent(),
        }
        written, _ = convert(source, selection, target, check=lambda place: None, **options)
    assert isinstance(written.place, Path)
    return values_of(written.place)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    model, optimizer = two()
    load_checkpoint(path, model=model, optimizer=optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {f"model/{name}": value for name, value in model.state_dict().items() if name != "head.weight"}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer/{names[id(parameter)]}/{key}"] = value
    return found


def weights_only(path: Path) -> dict[str, torch.Tensor]:
    model = Two()
    load_weights(model, path)
    return {f"model/{name}": value for name, value in model.state_dict().items() if name != "head.weight"}


def looked_at(path: Path) -> dict[str, torch.Tensor]:
    inspect_checkpoint(path)
    return {}


def verified(path: Path) -> dict[str, torch.Tensor]:
    if verify_checkpoint(path).damage:
        raise CheckpointError("damaged")
    return values_of(path)


READERS = (looked_at, verified, loaded, weights_only)


def restore(original: Path, path: Path) -> None:
    """Make the folder what it was before a mutation."""
    for file in (*path.glob("*"), *path.glob(".*")):
        if file.is_symlink() or not file.is_dir():
            file.unlink()
        else:
            file.rmdir()
    for file in original.iterdir():
        (path / file.name).write_bytes(file.read_bytes())


@pytest.mark.timeout(120)
def test_no_mutation_is_a_traceback_a_hang_or_another_value(original: Path, tmp_path: Path) -> None:
    wanted = values_of(original)
    path, target = tmp_path / original.name, tmp_path / "converted"
    path.mkdir()
    refused = accepted = 0
    for seed in range(MUTATIONS):
        restore(original, path)
        said = mutate(random.Random(seed), path)
        for reader in (*READERS, lambda at: converted(at, target)):
            started = time.monotonic()
            try:
                found = reader(path)
            except ShardwiseError as error:
                assert len(str(error)) < 4000, (seed, said)
                refused += 1
                continue
            except Exception as error:
                raise AssertionError(f"seed {seed}, {said}: {type(error).__name__}: {error}") from error
            assert time.monotonic() - started < 20, (seed, said)
            accepted += bool(found)
            for name in found.keys() & wanted.keys():  # a tensor under a new name is no mistake that could be seen
                value, right = found[name], wanted[name]
                same = torch.equal(value, right) and value.dtype == right.dtype
                empty = not value.numel() and not right.numel()  # no byte contradicts another dtype or shape
                assert same or empty, f"seed {seed}, {said}: {name} has other values"
        shutil.rmtree(target, ignore_errors=True)
    assert refused > MUTATIONS and accepted > MUTATIONS // 5


# one flipped bit in weights


def saved_decoder(root: Path) -> Path:
    """A checkpoint of the model of `write_config`."""
    model = byte_decoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with Saver(root, keep=1, async_save=False) as saver:
        return Path(str(saver.save(1, model=model, optimizer=optimizer, plan=Plan(), state={}, rng=None)))


def flip(path: Path, name: str) -> None:
    """One bit in the middle of a tensor."""
    file = path / FIRST
    header, content = header_of(file)
    begin, end = header[name]["data_offsets"]
    data = bytearray(file.read_bytes())
    data[len(data) - len(content) + (begin + end) // 2] ^= 1
    file.write_bytes(data)


def base_weights(model: nn.Module, path: Path, **options: bool) -> None:
    model.requires_grad_(False)
    BaseWeights(model, path, **options).close()


@pytest.mark.parametrize("read", [load_weights, base_weights])
def test_weights_with_a_flipped_bit_are_refused_by_name(tmp_path: Path, read: Callable[..., None]) -> None:
    path = saved_decoder(tmp_path / "checkpoints")
    read(byte_decoder(), path)
    flip(path, EMBED)
    model = byte_decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=f"bytes that are not those that were saved: {EMBED} in '.*{FIRST}'"):
        read(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    read(model, path, verify=False)


def read_together(path: str) -> list[str]:
    said = []
    for read in (load_weights, base_weights):
        with pytest.raises(CheckpointError) as caught:
            read(byte_decoder(), Path(path), collective=True)
        said.append(str(caught.value))
    return said


def test_a_flipped_bit_that_one_rank_finds_is_said_by_all(tmp_path: Path) -> None:
    path = saved_decoder(tmp_path / "checkpoints")
    flip(path, EMBED)
    first, second = run_world(read_together, 2, str(path))
    assert first == second
    assert all(EMBED in said and FIRST in said for said in first)


def test_training_does_not_begin_with_a_flipped_bit(tmp_path: Path) -> None:
    path = saved_decoder(tmp_path / "checkpoints")
    flip(path, EMBED)
    config = configs.write_config(tmp_path, model={"weights": str(path)})
    for words in (["parallel.strategy=ddp"], ["parallel.strategy=ddp+lora", "lora.rank=4"]):
        _, err = configs.train(config, *words, exit_code=3)
        assert f"bytes that are not those that were saved: {EMBED} in '{path / FIRST}'" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(("key", "value"), [("lr", "much"), ("betas", 0.9), ("betas", [0.9, "x"]), ("eps", {})])
def test_a_hyperparameter_that_is_no_number_is_refused_before_a_step(
    original: Path, tmp_path: Path, key: str, value: Any
) -> None:
    path = shutil.copytree(original, tmp_path / original.name)
    forge(path, lambda d: d["optimizer"]["groups"][0]["options"].update({key: value}))
    model, optimizer = two()
    with pytest.raises(CheckpointError, match=f"optimizer: {key} of group 0 is "):
        load_checkpoint(path, model=model, optimizer=optimizer)


# conversions that end early, and adapters on tied weights


class Ends(Silent):
    """Ends the conversion after some bytes."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def tick(self, num_bytes: int) -> None:
        self.end()


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("to", ["shardwise", "hf"])
def test_a_conversion_that_is_interrupted_or_killed_leaves_nothing_under_the_name(
    original: Path, tmp_path: Path, to: Any
) -> None:
    target = tmp_path / "converted"
    options: dict[str, Any] = {"to": to, "max_shard_bytes": 64, "extras": Extras()}

    def run(progress: Silent) -> None:
        with OwnSource(original) as source:
            selection = select(source, None, dtype=None, weights_only=to == "hf", reason="")
            convert(source, selection, target, check=lambda place: None, progress=progress, **options)

    with pytest.raises(KeyboardInterrupt):
        run(Ends(interrupt))
    assert not list(tmp_path.iterdir())
    child = os.fork()
    if not child:
        try:
            run(Ends(lambda: os._exit(9)))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-converted"]
    run(Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]
    with open_source(target) as source:
        assert torch.equal(source.read(EMBED, Box((0, 0), (6, 4))), values_of(original)[EMBED])


class HeadFirst(nn.Module):
    """Tied weights that are stored under the name of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.embed = nn.Embedding(6, 4)
        self.embed.weight = self.head.weight


@pytest.mark.parametrize("base", [HeadFirst, Two])
def test_an_adapter_on_a_tied_weight_is_not_merged(tmp_path: Path, base: Callable[[], nn.Module]) -> None:
    """Merged into the head it would change the embedding, too, which the adapter does not."""
    parts = {"lora_A": nn.Linear(4, 2, bias=False), "lora_B": nn.Linear(2, 6, bias=False)}
    adapters = nn.ModuleDict({"head": nn.ModuleDict(parts)})
    with Saver(tmp_path / "run", keep=1) as saver:
        optimizer = torch.optim.SGD(adapters.parameters())
        path = saver.save(1, model=adapters, optimizer=optimizer, plan=Plan(), state={}, rng=None)
    live = LiveSource(base(), "base")
    selection = select(live, None, dtype=None, weights_only=True, reason="")
    saved = SavedAdapters("lora", AdapterOptions(rank=2), ("head",), None, None, None, "fp32")
    with OwnSource(path) as own, pytest.raises(ModelError, match=r"head has an adapter, and its weight is also embed"):
        MergedSource(live, selection, own, saved, transposed=(), packed=(), dtype=None)


def test_two_conversions_into_one_folder(original: Path, tmp_path: Path) -> None:
    target, working = tmp_path / "converted", tmp_path / ".tmp-converted"
    with FolderLock(working):
        (working / "of the first").touch()
        with pytest.raises(UserError, match="another run is saving checkpoints to"):
            converted(original, target)
        assert (working / "of the first").exists() and not target.exists()


def test_a_manifest_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "LARGEST_MANIFEST", 100)
    with pytest.raises(CheckpointError, match="more than the 100 that are read; save from fewer ranks"):
        saved_decoder(tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob("*step-*"))


@pytest.mark.parametrize(
    "state", [{"position": "x"}, {"scheduler": 3}, {"order": []}, {"loss": "low"}, {"tokens": None}], ids=str
)
def test_a_forged_state_is_damage_and_no_traceback(tmp_path: Path, state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="is damaged: its state is not a run's"), reading_state(tmp_path):
        facts = {"position": 1, "tokens": 2, "loss": 0.5, "order": {}, "scheduler": {"total": 3}} | state
        int(facts["position"]), int(facts["tokens"]), float(facts["loss"])  # type: ignore[call-overload,arg-type]
        facts["order"].get("x"), facts["scheduler"]["total"]  # type: ignore[attr-defined,index]
