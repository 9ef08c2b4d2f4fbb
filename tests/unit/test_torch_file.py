"""Files of torch.save: every tensor bit for bit, a part at a time, and files that were made to mislead."""

from __future__ import annotations

import io
import os
import pickle
import random
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.readers import torch_file
from shardwise.checkpoint.readers.inert import InertRecord
from shardwise.checkpoint.readers.torch_file import StoredTensor, TorchFile
from shardwise.checkpoint.storage.local_storage import RangeReader, folder_of
from shardwise.errors import CheckpointError


class Asks:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


class Evil(dict):
    """A dict that asks for a call among its members."""


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(24, 36, generator=generator)
    shared = torch.nn.Parameter(torch.ones(3))
    shared.note = "an attribute of its own"
    return {
        "plain": base,
        "view": base[3:9, 5:11],
        "transposed": base.t(),
        "strided": base[::3, ::7],
        "permuted": torch.randn(5, 6, 7, generator=generator).permute(2, 0, 1),
        "expanded": torch.ones(1).expand(5, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(base[0].clone()),
        "frozen": torch.nn.Parameter(base[1].clone(), requires_grad=False),
        "attribute": shared,
        "buffer": torch.nn.Buffer(torch.arange(4.0)),
        "f64": base.double(),
        "f16": base.half(),
        "bf16": base.bfloat16(),
        "c64": torch.complex(base, -base),
        "c128": torch.complex(base, -base).to(torch.complex128),
        "bool": base > 0,
        **{str(dtype): (base * 9).to(dtype) for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)},
        "u8": (base.abs() * 9).to(torch.uint8),
    }


def newer_tensors() -> dict[str, torch.Tensor]:
    """Of dtypes that the old format of torch.save cannot hold."""
    base = torch.randn(24, 36).abs() * 9
    dtypes = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    return {str(dtype): base.to(dtype) for dtype in dtypes}


def bits(tensor: torch.Tensor) -> tuple:
    full = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return tuple(tensor.shape), tensor.dtype, full.view(-1).view(torch.uint8).numpy().tobytes()


def full(stored: StoredTensor) -> Box:
    return Box((0,) * len(stored.shape), stored.shape)


def some_box(shape: tuple[int, ...], generator: random.Random) -> Box:
    offsets = tuple(generator.randrange(size) if size else 0 for size in shape)
    return Box(offsets, tuple(generator.randint(0, size - begin) for size, begin in zip(shape, offsets, strict=True)))


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))]


def rewritten(path: Path, changes: dict[str, bytes | None], *, compress: bool = False) -> Path:
    """The archive with other contents, and with entries added or left out."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    root = next(iter(entries)).split("/")[0]
    entries.update({f"{root}/{name}": data for name, data in changes.items()})
    target = path.with_name("rewritten.pt")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as new:
        for name, data in entries.items():
            if data is not None:
                new.writestr(name, data)
    return target


@pytest.fixture(params=[True, False], ids=["zip", "old format"])
def saved(request, tmp_path) -> tuple[Path, dict]:
    content = {
        **tensors(),
        **(newer_tensors() if request.param else {}),
        "inner": [torch.arange(4), {"n": 1.5}, "text"],
    }
    path = tmp_path / "some.pt"
    torch.save(content, path, _use_new_zipfile_serialization=request.param)
    return path, content


def test_every_tensor_is_bit_equal(saved):
    path, _ = saved
    wanted = torch.load(path, weights_only=False)
    with TorchFile(path) as file:
        assert file.content.keys() == wanted.keys()
        for name, tensor in wanted.items():
            if name != "inner":
                stored = file.content[name]
                assert isinstance(stored, StoredTensor), name
                found = file.read(stored, full(stored))
                assert found.is_contiguous() and not found.requires_grad
                assert bits(found) == bits(tensor), name
        arange, *rest = file.content["inner"]
        assert rest == [{"n": 1.5}, "text"] and bits(file.read(arange, full(arange))) == bits(torch.arange(4))


def test_every_part_is_bit_equal(saved, monkeypatch):
    path, content = saved
    generator = random.Random(5)
    for gap, chunk in ((torch_file.GAP, torch_file.CHUNK), (8, 64), (64, 256), (0, 16)):  # so that all branches are met
        monkeypatch.setattr(torch_file, "GAP", gap)
        monkeypatch.setattr(torch_file, "CHUNK", chunk)
        with TorchFile(path) as file:
            for name, tensor in content.items():
                for _ in range(6 if name != "inner" else 0):
                    box = some_box(tuple(tensor.shape), generator)
                    assert bits(file.read(file.content[name], box)) == bits(part(tensor, box)), (name, box)


def test_tied_tensors_share_a_storage(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 4))
    torch.save({"a": weight, "b": weight, "c": weight.detach(), "d": weight[1:]}, tmp_path / "a.pt")
    with TorchFile(tmp_path / "a.pt") as file:
        a, b, c, d = file.content.values()
        assert a == b == c and d.key == a.key and d.offset == 4


def test_what_is_around_the_tensors_comes_back(tmp_path):
    layer = torch.nn.Linear(2, 2)
    content = {
        "epoch": 3,
        "state": layer.state_dict(),
        "size": torch.Size([2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "storage": torch.arange(3).untyped_storage(),
    }
    torch.save(content, tmp_path / "a.pt")
    with TorchFile(tmp_path / "a.pt") as file:
        assert list(file.content["state"]) == ["weight", "bias"]
        assert file.content["size"] == (2,) and file.content["dtype"] is torch.bfloat16 and file.content["epoch"] == 3
        assert isinstance(file.content["device"], InertRecord) and file.content["device"].args == ("cpu",)
        assert file.content["storage"].num_bytes == 24


@pytest.mark.parametrize("place", ["inside a file", "behind a URL"])
def test_it_is_read_elsewhere(place, tmp_path):
    buffer = io.BytesIO()
    wanted = torch.randn(3, 5)
    torch.save(wanted, buffer)
    if place == "inside a file":
        path, begin, length = tmp_path / "a.distcp", 1000, len(buffer.getvalue())
        path.write_bytes(b"PK\x03\x04" * 250 + buffer.getvalue() + b"PK\x05\x06" * 300)
    else:
        path, begin, length = folder_of("memory://torch-file/a.pt"), 0, None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    with TorchFile(path, begin, length) as file:
        assert bits(file.read(file.content, Box((0, 1), (3, 3)))) == bits(wanted[:, 1:4])


def test_big_endian_files_are_turned(tmp_path):
    wanted = {name: torch.randn(6).to(dtype) for name, dtype in (("f", torch.float32), ("h", torch.bfloat16))}
    wanted["c"] = torch.randn(6, dtype=torch.complex64)
    wanted["b"] = torch.tensor([True, False])
    torch.save(wanted, tmp_path / "a.pt")
    units = {"data/0": 4, "data/1": 2, "data/2": 4, "data/3": 1}
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        turned = {n: b"".join(_reversed(archive.read(f"a/{n}"), unit)) for n, unit in units.items()}
    path = rewritten(tmp_path / "a.pt", {**turned, "byteorder": b"big"})
    expected = torch.load(path, weights_only=True)
    with TorchFile(path) as file:
        for name, stored in file.content.items():
            assert stored.big_endian
            assert bits(file.read(stored, full(stored))) == bits(expected[name]) == bits(wanted[name])
    with pytest.raises(CheckpointError, match="byte order is b'middle'"):
        TorchFile(rewritten(tmp_path / "a.pt", {"byteorder": b"middle"}))


def _reversed(data: bytes, unit: int) -> list[bytes]:
    return [data[i : i + unit][::-1] for i in range(0, len(data), unit)]


def test_several_threads_read(tmp_path):
    content = {str(i): torch.randn(64, 64) for i in range(16)}
    torch.save(content, tmp_path / "a.pt")
    with TorchFile(tmp_path / "a.pt") as file, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda name: file.read(file.content[name], Box((0, 8), (64, 32))), content)
        assert all(bits(a) == bits(b[:, 8:40]) for a, b in zip(found, content.values(), strict=True))


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    big = torch.randn(256, 1 << 16)  # 64 MiB
    torch.save({"big": big, "turned": big.t()}, tmp_path / "a.pt")
    counted: list[int] = []
    original = RangeReader.read_into

    def counting(self, begin, buffer):
        counted.append(memoryview(buffer).nbytes)
        original(self, begin, buffer)

    monkeypatch.setattr(RangeReader, "read_into", counting)
    with TorchFile(tmp_path / "a.pt") as file:
        assert sum(counted) < 1 << 17, "the objects, not the tensors"
        for name, box, limit in (
            ("big", Box((3, 0), (2, 1 << 16)), 2 << 18),
            ("big", Box((0, 100), (256, 2)), 256 * 8),
            ("big", Box((0, 0), (256, 1 << 15)), 1 << 25),
            ("turned", Box((7, 0), (2, 256)), 256 * 8),
            ("turned", Box((0, 5), (1 << 16, 1)), 1 << 18),
        ):
            counted.clear()
            found = file.read(file.content[name], box)
            assert torch.equal(found, part(big if name == "big" else big.t(), box))
            assert sum(counted) <= limit + 200, (name, box)


def test_checksums_are_right_or_left_out(tmp_path):
    torch.save({"a": 1}, tmp_path / "a.pt")
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"a": 1}, tmp_path / "b.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    for name in ("a.pt", "b.pt"):
        with TorchFile(tmp_path / name) as file:
            assert file.content == {"a": 1}
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(data.replace(b"K\x01s.", b"K\x02s."))
    with pytest.raises(CheckpointError, match=r"c\.pt' is damaged: the checksum of data\.pkl is wrong"):
        TorchFile(tmp_path / "c.pt")


# payloads


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old format"])
def test_a_payload_beside_tensors_does_not_run(new, tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "a.pt"
    torch.save(
        {"weight": torch.ones(2), "x": Asks(os.system, f"touch {mark}")}, path, _use_new_zipfile_serialization=new
    )
    with pytest.raises(CheckpointError, match=r"a\.pt' asks to run.*not run: 'posix\.system'"):
        TorchFile(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the payload is real"


class Hiding(pickle.Pickler):
    """Refers to a storage of 4 floats by a reference that is ``reference``."""

    def __init__(self, stream: io.BytesIO, reference: tuple):
        super().__init__(stream, 2)
        self.reference = reference

    def persistent_id(self, value):
        return self.reference if isinstance(value, Evil) else None


def objects(reference: tuple, content: object) -> bytes:
    stream = io.BytesIO()
    Hiding(stream, reference).dump(content)
    return stream.getvalue()


def tensor_of(shape: tuple, stride: tuple, offset: int = 0, **more: object) -> Asks:
    return Asks(torch._utils._rebuild_tensor_v2, Evil(), offset, shape, stride, False, {}, more)


FOUR = ("storage", torch.FloatStorage, "0", "cpu", 4)


@pytest.fixture
def four(tmp_path) -> Path:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_a_payload_in_a_reference_does_not_run(four, tmp_path):
    mark = tmp_path / "ran"
    for reference in (("storage", Asks(os.system, f"touch {mark}"), "0", "cpu", 4), (*FOUR, Asks(eval, "1"))):
        path = rewritten(four, {"data.pkl": objects(reference, {"a": tensor_of((4,), (1,))})})
        with pytest.raises(CheckpointError, match=r"'posix\.system'|'__builtin__\.eval'"):
            TorchFile(path)
    assert not mark.exists()


def test_a_made_up_file_is_read_where_it_is_right(four):
    path = rewritten(four, {"data.pkl": objects(FOUR, {"a": tensor_of((2, 2), (1, 2))})})
    with TorchFile(path) as file:
        assert file.read(file.content["a"], Box((0, 0), (2, 2))).tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("reference", "content", "says"),
    [
        (FOUR, tensor_of((5,), (1,)), "reaches outside of its storage '0', which holds 4 elements"),
        (FOUR, tensor_of((4,), (1,), 1), "reaches outside"),
        (FOUR, tensor_of((2, 2), (3, 1)), "reaches outside"),
        (FOUR, tensor_of((1 << 60,), (1 << 61,)), "reaches outside"),
        (FOUR, tensor_of((1 << 40,), (0,)), "repeats a storage of 4 elements"),
        (FOUR, tensor_of((4,), (-1,), 3), "not valid integers"),
        (FOUR, tensor_of((-4,), (1,)), "not valid integers"),
        (FOUR, tensor_of((4,), (1,), -1), "not valid integers"),
        (FOUR, tensor_of((4.0,), (1,)), "not valid integers"),
        (FOUR, tensor_of((4,), (1, 1)), "strides"),
        (FOUR, tensor_of((1,) * 65, (1,) * 65), "not valid integers"),
        (FOUR, tensor_of((4,), (1,), conj=True), "conjugated"),
        (("storage", torch.FloatStorage, "0", "cpu", 5), tensor_of((4,), (1,)), "should have 20 bytes and has 16"),
        (("storage", torch.DoubleStorage, "0", "cpu", 4), tensor_of((4,), (1,)), "should have 32 bytes and has 16"),
        (("storage", torch.FloatStorage, "7", "cpu", 4), tensor_of((4,), (1,)), "storage '7'.*has nothing"),
        (("storage", torch.FloatStorage, "../data.pkl", "cpu", 1), tensor_of((1,), (1,)), "has nothing"),
        (("storage", torch.FloatStorage, "0\x1b[2J", "cpu", 1), tensor_of((1,), (1,)), r"'0\\x1b\[2J'"),
        (("storage", torch.FloatStorage, "0", "cpu", -4), tensor_of((4,), (1,)), "not a torch storage"),
        (("storage", torch.FloatStorage, "0", "cpu", "4"), tensor_of((4,), (1,)), "not a torch storage"),
        (("storage", torch.float32, "0", "cpu", 4), tensor_of((4,), (1,)), "not a torch storage"),
        (("storage", torch.FloatStorage, 0, "cpu", 4), tensor_of((4,), (1,)), "not a torch storage"),
        (("module", 1), tensor_of((4,), (1,)), "not a torch storage"),
        (("storage", torch.QInt8Storage, "0", "cpu", 4), tensor_of((4,), (1,)), "quantized"),
    ],
)
def test_tensors_stay_inside_of_their_storage(four, reference, content, says):
    path = rewritten(four, {"data.pkl": objects(reference, {"a": content})})
    with pytest.raises(CheckpointError, match=says) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value)


def test_a_place_outside_of_a_tensor_is_refused(four):
    with TorchFile(four) as file:
        stored = file.content["a"]
        for box in (Box((1,), (4,)), Box((-1,), (2,)), Box((0, 0), (1, 1)), Box((0,), (-1,))):
            with pytest.raises(CheckpointError, match="are wanted of a tensor of shape"):
                file.read(stored, box)
        made_up = StoredTensor(torch.float32, (8,), (1,), 0, "0")
        with pytest.raises(CheckpointError, match="storage '0' has 16 bytes, 32 are needed"):
            file.read(made_up, Box((0,), (1,)))
        with pytest.raises(CheckpointError, match="data/9 is missing"):
            file.read(StoredTensor(torch.float32, (1,), (1,), 0, "9"), Box((0,), (1,)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized tensor"),
        (lambda: torch.ones(2, device="meta"), "meta device"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
    ],
    ids=["sparse", "quantized", "meta", "conjugated"],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_are_not_plain_are_refused(make, says, tmp_path):
    torch.save({"a": make()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=says):
        TorchFile(tmp_path / "a.pt")


def test_a_whole_model_is_refused_with_the_fix(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"(?s)torch\.nn\.modules\.linear\.Linear'.*save model\.state_dict"):
        TorchFile(tmp_path / "a.pt")


# other files


@pytest.mark.parametrize(
    ("changes", "compress", "says"),
    [
        ({}, True, "is compressed"),
        ({"constants.pkl": b"N."}, False, "TorchScript"),
        ({"data.pkl": None}, False, r"0 entries data\.pkl"),
        ({"../other/data.pkl": b"N."}, False, None),
        ({"data/0": None}, False, "storage '0' should have 16 bytes and has nothing"),
        ({"data/0": b"abc"}, False, "storage '0' should have 16 bytes and has 3 bytes"),
        ({"data.pkl": b""}, False, "is damaged"),
    ],
)
def test_odd_archives_are_refused(four, changes, compress, says):
    path = rewritten(four, changes, compress=compress)
    if says is None:
        TorchFile(path).close()
        return
    with pytest.raises(CheckpointError, match=says) as caught:
        TorchFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "begins with b''"),
        (b"hello there", "begins with b'hello th'"),
        (b"PK\x03\x04 and nothing else", "not a zip file"),
        (pickle.dumps({"a": 1}), "has objects of Python"),
        (b"\x80\x02K", "is damaged"),
        (b"x" * 257 + b"ustar" + b"x" * 300, "tar archive"),
    ],
)
def test_other_files_are_refused(data, says, tmp_path):
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=says) as caught:
        TorchFile(tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"a\.pt' cannot be opened"):
        TorchFile(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        TorchFile(folder_of("memory://torch-file/no.pt"))


def test_a_place_outside_of_the_file(four):
    size = four.stat().st_size
    for begin, length in ((0, size + 1), (size + 1, None), (-1, 5), (10, size)):
        with pytest.raises(CheckpointError, match="are wanted"):
            TorchFile(four, begin, length)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old format"])
def test_every_truncation_is_an_error(new, tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(40.0), "b": torch.ones(3)}, path, _use_new_zipfile_serialization=new)
    data = path.read_bytes()
    for size in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"a\.pt'"):
            TorchFile(path)


def test_a_file_that_shrinks_while_it_is_open(four):
    with TorchFile(four) as file:
        os.truncate(four, 100)
        with pytest.raises(CheckpointError, match=r"a\.pt' is damaged: the file ends"):
            file.read(file.content["a"], Box((0,), (4,)))


@pytest.mark.parametrize("new", [True, False], ids=["zip", "old format"])
def test_mutated_files_are_read_or_refused(new, tmp_path):
    """No other exception and no big piece of memory, whatever the bytes."""
    content = {
        "a": torch.arange(6.0),
        "b": torch.ones(2, 2).t(),
        "n": [1, "x", {"k": 2.5}],
        "p": torch.nn.Parameter(torch.ones(1)),
    }
    path = tmp_path / "a.pt"
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)  # so that the checksum does not find it first
        torch.save(content, path, _use_new_zipfile_serialization=new)
    finally:
        torch.serialization.set_crc32_options(before)
    data = path.read_bytes()
    generator = random.Random(11)
    # the bytes that say something; flips in padding and in tensors are none of interest
    spots = [place for place, byte in enumerate(data) if byte or generator.random() < 0.05]
    read = refused = 0
    tracemalloc.start()
    try:
        for _ in range(700):
            changed = bytearray(data)
            for _ in range(generator.choice((1, 1, 2, 6))):
                place = generator.choice(spots)
                changed[place] = generator.choice(
                    (generator.randrange(256), changed[place] ^ (1 << generator.randrange(8)), 255)
                )
            path.write_bytes(changed)
            try:
                with TorchFile(path) as file:
                    for value in file.content.values() if isinstance(file.content, dict) else ():
                        if isinstance(value, StoredTensor) and value.numel < 1 << 20:
                            file.read(value, full(value))
                read += 1
            except CheckpointError as error:
                assert str(path) in str(error)
                refused += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read > 30 and refused > 200
    assert peak < 32 << 20
