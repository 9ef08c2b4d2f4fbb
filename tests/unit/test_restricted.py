"""Object streams of other tools: read as plain values, and nothing that they ask for is ever run."""

from __future__ import annotations

import argparse
import builtins
import collections
import datetime
import io
import os
import pathlib
import pickle
import pickletools
import random
import re
import subprocess
import sys
import tracemalloc
import types

import numpy as np
import pytest
import torch

from shardwise.checkpoint.readers import restricted
from shardwise.checkpoint.readers.inert import InertRecord, Maker
from shardwise.checkpoint.readers.restricted import load_restricted
from shardwise.errors import CheckpointError

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
EVERYTHING = {
    "numbers": [0, -1, 255, 70000, -(1 << 40), 1 << 100, 2.5, float("inf"), True, False, None, 1 + 2j],
    "text": ["", "abc", "hé\n\\'", "x" * 300],
    "bytes": [b"", b"ab\xff", b"y" * 300, bytearray(b"z")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "sets": [{1, "a"}, frozenset({2, (3, 4)}), set()],
    "dicts": {1: "a", (2, 3): {}, None: [[]]},
    "torch": [torch.Size([1, 2]), torch.float32, torch.bfloat16, torch.float8_e4m3fn],
    "collections": [
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        collections.defaultdict(list, x=[1]),
    ],
    "numpy": [np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(7), np.float64(0.1)],
}


class Asks:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def name(full: str) -> bytes:
    module, _, last = full.rpartition(".")
    return b"c" + module.encode() + b"\n" + last.encode() + b"\n"


def stack_name(module: str, last: str) -> bytes:
    return text(module) + text(last) + b"\x93"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_come_back(protocol):
    assert load_restricted(pickle.dumps(EVERYTHING, protocol), "x") == EVERYTHING


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_object_stays_the_same(protocol):
    shared = [1]
    found = load_restricted(pickle.dumps([shared, shared, {"a": shared}], protocol), "x")
    assert found[0] is found[1] is found[2]["a"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_instances_of_data_classes_become_records(protocol):
    values = [
        argparse.Namespace(a=1),
        types.SimpleNamespace(b=[2]),
        torch.device("cuda", 1),
        datetime.timedelta(1, 2, 3),
        pathlib.PurePosixPath("/a/b"),
        np.arange(3, dtype=np.int32),
        slice(1, 2, 3),
    ]
    namespace, simple, device, delta, path, array, piece = load_restricted(pickle.dumps(values, protocol), "x")
    assert (namespace.name, namespace.get("a"), namespace.get("c", 5)) == ("argparse.Namespace", 1, 5)
    assert (simple.name, simple.state) == ("types.SimpleNamespace", {"b": [2]})
    assert (device.name, device.args) == ("torch.device", ("cuda", 1))
    assert (delta.name, delta.args) == ("datetime.timedelta", (1, 2, 3))
    assert path == "/a/b"
    assert array.name == "numpy.ndarray" and bytes(array.state[4]) == np.arange(3, dtype=np.int32).tobytes()
    assert array.state[1] == (3,) and array.state[2].args[0] == "i4"
    assert (piece.name, piece.args) == ("builtins.slice", (1, 2, 3))


def test_a_reference_goes_to_the_callback():
    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", value.key) if isinstance(value, argparse.Namespace) else None

    for protocol in (2, 4):
        stream = io.BytesIO()
        Pickler(stream, protocol).dump({"a": argparse.Namespace(key="7")})
        assert load_restricted(stream.getvalue(), "x", lambda reference: list(reference)) == {"a": ["storage", "7"]}
        with pytest.raises(CheckpointError, match="refers to an object outside"):
            load_restricted(stream.getvalue(), "x")


def test_every_opcode_is_thought_of():
    known = restricted._LITERALS | restricted._ACTIONS.keys() | {"STOP"}
    assert known == {opcode.name for opcode in pickletools.opcodes}
    assert not restricted._LITERALS & restricted._ACTIONS.keys()


# payloads: what they spell, and how


def payloads(mark: str) -> dict[str, tuple[str, bytes]]:
    """Streams that touch ``mark`` when Python's own loader reads them, with the name to be refused."""
    shell, code = f"touch {mark}", f"open({mark!r}, 'w')"
    system = ("posix.system", Asks(os.system, shell))
    found = {f"reduce, protocol {p}": (system[0], pickle.dumps(["fine", system[1]], p)) for p in PROTOCOLS}
    args, call = text(shell) + b"\x85", name("posix.system")
    mapped = name("builtins.map") + call + b"]" + text(shell) + b"a\x86"
    found |= {
        "eval": ("builtins.eval", pickle.dumps(Asks(eval, code), 4)),
        "exec": ("builtins.exec", pickle.dumps(Asks(exec, code), 4)),
        "old spelling of eval": ("__builtin__.eval", pickle.dumps(Asks(eval, code), 2)),
        "popen": ("subprocess.Popen", pickle.dumps(Asks(subprocess.Popen, ["touch", mark]), 4)),
        "inst": ("os.system", b"(S'" + shell.encode() + b"'\nios\nsystem\n."),
        "obj": ("posix.system", b"(" + call + text(shell) + b"o."),
        "newobj": ("builtins.map", b"\x80\x04" + name("builtins.set") + mapped + b"\x81\x85R."),
        "newobj_ex": ("builtins.map", b"\x80\x04" + name("builtins.set") + mapped + b"}\x92\x85R."),
        "setstate": (
            "posix.system",
            name("argparse.Namespace") + b")\x81}" + text("__setstate__") + call + b"sb" + text(shell) + b"b.",
        ),
        "dotted name": ("tempfile._os.system", b"\x80\x04" + stack_name("tempfile", "_os.system") + args + b"R."),
        "chain of getattr": (
            "builtins.getattr",
            name("builtins.getattr")
            + name("builtins.object")
            + text("__subclasses__")
            + b"\x86R)R0"
            + call
            + args
            + b"R.",
        ),
        "key of a dict": ("posix.system", b"}" + call + args + b"RK\x01s."),
        "thrown away": ("posix.system", call + args + b"R0K\x01."),
        "in the memo only": ("posix.system", call + args + b"Rq\x000K\x01."),
        "numpy array": (
            "posix.system",
            name("numpy._core.multiarray._reconstruct") + call + b"K\x00\x85C\x01b\x87R" + call + args + b"R0.",
        ),
        "partial": ("functools.partial", name("functools.partial") + call + text(shell) + b"\x86R)R."),
        "default of a dict": ("posix.system", name("collections.defaultdict") + call + b"\x85R" + call + args + b"R0."),
    }
    return found


KINDS = list(payloads(""))


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_is_refused_by_name_and_does_not_run(kind, tmp_path, monkeypatch):
    mark = tmp_path / "ran"
    wanted, data = payloads(str(mark))[kind]

    def no_import(*args, **kwargs):
        raise AssertionError(f"imports {args[0]}")

    "".encode("raw_unicode_escape")  # Python imports this codec when protocol 0 first needs it
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", no_import)
        with pytest.raises(CheckpointError) as caught:
            load_restricted(data, "some/file.pt")
    message = str(caught.value)
    assert f"'{wanted}'" in message and "'some/file.pt'" in message and "not run" in message
    assert not mark.exists()


@pytest.mark.parametrize("kind", [k for k in KINDS if "numpy" not in k and "default" not in k and "popen" not in k])
def test_the_payloads_are_real(kind, tmp_path):
    mark = tmp_path / "ran"
    script = "import pickle, sys\ntry:\n    pickle.loads(sys.stdin.buffer.read())\nexcept Exception as e:\n    print(e)"
    _, data = payloads(str(mark))[kind]
    subprocess.run([sys.executable, "-c", script], input=data, check=True, timeout=60, capture_output=True)
    assert mark.exists()


UNKNOWN = (
    "os.system nt.system posix.popen subprocess.check_output torch.hub.load webbrowser.open torch.load "
    "torch.serialization.load torch.storage._load_from_bytes pickle.loads _pickle.loads importlib.import_module "
    "runpy.run_path shutil.rmtree ctypes.CDLL operator.attrgetter operator.methodcaller builtins.getattr builtins.open "
    "builtins.__import__ builtins.compile builtins.globals __builtin__.apply numpy.load numpy.testing.x.exec pip.main "
    "torch.nn.modules.linear.Linear torch._C._cuda_setDevice torch.utils.model_zoo.load_url timeit.timeit pdb.run "
    "code.interact pty.spawn socket.socket sys.exit omegaconf.dictconfig.DictConfig torch.jit.load io.open "
    "torch.distributed.tensor.DTensor torch._utils._import_dotted_name types.FunctionType types.CodeType"
)


@pytest.mark.parametrize("full", UNKNOWN.split())
def test_a_name_that_is_not_in_the_table_is_refused(full):
    module, _, last = full.rpartition(".")
    for spelled in (name(full), stack_name(module, last)):
        for use in (b".", b")R.", b")\x81.", b"0K\x01."):  # mentioned, called, made, thrown away
            with pytest.raises(CheckpointError, match=re.escape(f"'{full}'")):
                load_restricted(spelled + use, "x")


def test_all_refused_names_are_said_at_once():
    data = name("os.system") + name("builtins.eval") + name("os.system") + b"\x87."
    with pytest.raises(CheckpointError, match=r"(?s)'os.system'\n  'builtins.eval'\n") as caught:
        load_restricted(data, "x")
    assert str(caught.value).count("os.system") == 1


def test_a_refused_name_is_said_even_where_the_rest_is_damaged():
    with pytest.raises(CheckpointError, match=r"'os\.system'"):
        load_restricted(name("os.system") + b")R", "x")


def test_a_name_cannot_write_to_the_terminal():
    with pytest.raises(CheckpointError) as caught:
        load_restricted(stack_name("os\x1b[2J\n", "x" * 100_000) + b".", "x")
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 1000


def test_an_extension_code_is_refused():
    for data in (b"\x82\x05.", b"\x83\x05\x00.", b"\x84\x05\x00\x00\x00."):
        with pytest.raises(CheckpointError, match="extension 5"):
            load_restricted(data, "x")


def test_no_module_is_imported():
    assert "this" not in sys.modules and "antigravity" not in sys.modules
    for module in ("this", "antigravity"):
        with pytest.raises(CheckpointError):
            load_restricted(name(f"{module}.s") + b".", "x")
        assert module not in sys.modules


@pytest.mark.parametrize(
    ("full", "hint"),
    [
        ("torch.nn.modules.linear.Linear", "a full model"),
        ("torch.distributed.tensor.DTensor", "DTensors"),
        ("omegaconf.dictconfig.DictConfig", "OmegaConf.to_container"),
        ("os.system", "save it again with nothing but tensors"),
    ],
)
def test_the_refusal_says_what_to_do(full, hint):
    with pytest.raises(CheckpointError, match=hint):
        load_restricted(name(full) + b".", "x")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (name("torch.float32") + b")R.", "'dtype', which is not a known call"),
        (name("builtins.list") + b")R.", "'builtins.list', which is not a known call"),
        (
            name("numpy._core.multiarray._reconstruct") + name("collections.OrderedDict") + b"K\x00\x85C\x01b\x87R.",
            "class",
        ),
        (name("torch.Size") + b"](K\x01" + text("a") + b"e\x85R.", "not valid integers"),
        (name("builtins.bytearray") + b"J\xff\xff\xff\x7f\x85R.", "bytes are made of a int"),
        (name("_codecs.encode") + text("a") + text("rot13") + b"\x86R.", "bytes are made of a str"),
        (
            name("copyreg._reconstructor") + name("argparse.Namespace") + name("builtins.dict") + b"}\x87R.",
            "something else",
        ),
        (
            name("copyreg._reconstructor") + name("torch.Size") + name("builtins.object") + b"N\x87R.",
            "an unknown data class",
        ),
        (name("torch._tensor._rebuild_from_type_v2") + b"(K\x01" + name("argparse.Namespace") + b")NtR.", "class"),
        (
            name("torch._tensor._rebuild_from_type_v2")
            + b"("
            + name("collections.OrderedDict")
            + name("torch.Tensor")
            + b")NtR.",
            "not a function that creates tensors",
        ),
        (name("torch._utils._rebuild_tensor_v2") + b"(K\x01K\x00)))NtR.", "without a storage"),
        (name("torch._utils._rebuild_sparse_tensor") + b")R.", "sparse"),
        (name("torch._utils._rebuild_qtensor") + b")R.", "quantized"),
    ],
)
def test_a_known_name_cannot_be_abused(data, says):
    with pytest.raises(CheckpointError, match=says):
        load_restricted(data, "x")


# damaged and hostile streams


def nested(depth: int, begin: bytes, end: bytes) -> bytes:
    return begin * depth + end * depth + b"."


def laughs(levels: int) -> bytes:
    """Tuples of the tuple before, twice: few bytes, 2 ** levels values; the last one is left on the stack."""
    return b")q\x000" + b"h\x00h\x00\x86q\x000" * levels + b"h\x00"


HOSTILE = {
    "empty": b"",
    "no end": b"K\x01",
    "nothing at the end": b".",
    "no opcode": b"\xff\xff",
    "cut text": text("abcdef")[:-2],
    "text without end": b"V" + b"a" * 100,
    "huge text": b"\x8d" + (1 << 62).to_bytes(8, "little") + b"a.",
    "huge bytes": b"\x8e" + (1 << 63).to_bytes(8, "little") + b"a.",
    "huge bytearray": b"\x96" + (1 << 50).to_bytes(8, "little") + b"a.",
    "huge frame": b"\x95" + (1 << 60).to_bytes(8, "little") + b"K\x01",
    "long number": b"\x8b" + (1 << 20).to_bytes(4, "little") + b"\x01" * (1 << 20) + b".",
    "long digits": b"L" + b"9" * 100_000 + b"L\n.",
    "negative length": b"\x8b\xff\xff\xff\xff.",
    "bad number": b"Iabc\n.",
    "bad float": b"Fabc\n.",
    "bad text": b"X\x02\x00\x00\x00\xff\xff.",
    "no mark": b"K\x01e.",
    "no mark for a dict": b"d.",
    "no mark at pop": b"0.",
    "append to a number": b"K\x01K\x02a.",
    "set in a list": b"]K\x01K\x02s.",
    "add to a dict": b"}(K\x01\x90.",
    "odd dict": b"(K\x01d.",
    "odd items": b"}(K\x01u.",
    "list as key": b"}]K\x01s.",
    "dict in a set": b"\x8f(}\x90.",
    "list in a frozenset": b"(]\x91.",
    "nothing in the memo": b"h\x07.",
    "memo of nothing": b"q\x00.",
    "copy of nothing": b"2.",
    "name that is no text": b"K\x01K\x02\x93.",
    "call with a list": name("torch.Size") + b"]R.",
    "keywords that are no dict": name("torch.Size") + b")]\x92.",
    "keywords that are no text": name("types.SimpleNamespace") + b")}K\x01K\x01s\x92.",
    "unknown keyword": name("torch.Size") + b")}" + text("x") + b"K\x01s\x92.",
    "attributes of a number": b"K\x01}b.",
    "buffers": b"\x97.",
    "reference": text("a") + b"Q.",
    "old reference": b"Pabc\n.",
    "deep lists": nested(30_000, b"](", b"e"),
    "deep tuples": b")" + b"\x85" * 50_000 + b".",
    "deep records": name("argparse.Namespace") + b"q\x00" + b"h\x00)\x81" * 20_000 + b"b" * 19_999 + b".",
    "a list in itself": b"]q\x00h\x00a.",
    "a dict in itself": b"}q\x00" + text("a") + b"h\x00s.",
    "laughs": laughs(60) + b".",
    "laughs as a key": b"}" + laughs(60) + b"K\x01s.",
    "laughs in a set": b"\x8f(" + laughs(60) + b"\x90.",
    "laughs as a shape": name("torch.Size") + laughs(60) + b"\x85R.",
    "laughs as a class": name("torch._tensor._rebuild_from_type_v2") + b"(K\x01" + laughs(60) + b")NtR.",
    "laughs called": laughs(60) + b")R.",
}
BIG = b"](" + b"K\x01" * 50_000 + b"eq\x00" + text("x" * 50_000) + b"q\x01"
HOSTILE |= {
    "lists copied": BIG + (name("collections.deque") + b"q\x02") + b"h\x02h\x00\x85R" * 3_000 + b".",
    "text copied": BIG + (name("_codecs.encode") + b"q\x02") + b"h\x02h\x01\x85R" * 3_000 + b".",
    "arguments copied": BIG
    + b"("
    + b"K\x01" * 50_000
    + b"tq\x03"
    + name("argparse.Namespace")
    + b"q\x02"
    + b"h\x02h\x03R" * 3_000
    + b".",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_stream_is_an_error_and_nothing_else(kind):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="'some/file'"):
            load_restricted(HOSTILE[kind], "some/file")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("a list in itself", "contains itself"),
        ("a dict in itself", "contains itself"),
        ("deep lists", "100 levels deep"),
        ("laughs", "more places than can be walked"),
        ("laughs as a key", "a tuple is used as a key"),
        ("list as key", "a list is used as a key"),
        ("text copied", "copied over and over"),
        ("cut text", "is damaged"),
    ],
)
def test_the_error_says_what_is_wrong(kind, says):
    with pytest.raises(CheckpointError, match=says):
        load_restricted(HOSTILE[kind], "x")


def test_what_is_shared_without_harm_is_read():
    shared = [["a", 1]] * 1000
    assert load_restricted(pickle.dumps(shared, 4), "x") == shared
    deep: list = []
    for _ in range(90):
        deep = [deep]
    assert load_restricted(pickle.dumps(deep, 4), "x") == deep


def test_mutated_streams_are_read_or_refused():
    """No other exception, whatever the bytes."""
    generator = random.Random(7)
    seeds = [pickle.dumps([EVERYTHING, argparse.Namespace(a=np.arange(2)), torch.device("cpu")], p) for p in PROTOCOLS]
    read = refused = 0
    for number in range(3000):
        data = bytearray(seeds[number % len(seeds)])
        for _ in range(generator.choice((1, 1, 2, 8))):
            place = generator.randrange(len(data))
            kind = generator.randrange(3)
            if kind == 0:
                data[place] = generator.randrange(256)
            elif kind == 1:
                del data[place : place + generator.randrange(1, 9)]
            else:
                data[place:place] = bytes(generator.randrange(256) for _ in range(generator.randrange(1, 5)))
        try:
            load_restricted(bytes(data), "x")
            read += 1
        except CheckpointError:
            refused += 1
    assert read > 100 and refused > 1000


def test_nothing_that_could_run_comes_out():
    """Where the tables' names are only mentioned, an inert value comes out, none of them callable."""
    from shardwise.checkpoint.readers.inert import _TABLE

    for full, value in _TABLE.items():
        found = load_restricted(name(full) + b".", "x")
        assert found is value
        assert not callable(found), full
        assert not isinstance(found, Maker) or found.make is None or found.make.__module__.startswith("shardwise.")
    assert not callable(InertRecord("a"))
