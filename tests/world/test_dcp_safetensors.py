"""What DCP writes as safetensors, in pieces, by a real writer on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.layout import Box
from shardwise.checkpoint.readers.detect import open_source
from shardwise.errors import CheckpointError
from tests.worlds import run_world


def values() -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(14.0).reshape(7, 2),
        "columns": torch.arange(15).reshape(3, 5),
        "whole": torch.arange(4).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
    }


def write(root: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate(), "scalar": Replicate()}
    state = {name: distribute_tensor(tensor, mesh, [layout[name]]) for name, tensor in values().items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(root, save_distributed=True))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_pieces_are_put_together(tmp_path: Path, world: int) -> None:
    run_world(write, world, str(tmp_path))
    with open_source(tmp_path) as source:
        assert source.kind == "PyTorch DCP folder of safetensors"
        assert set(source.tensors) == {f"model/{name}" for name in values()}
        for name, expected in values().items():
            info = source.tensors[f"model/{name}"]
            assert (info.dtype, info.shape) == (expected.dtype, tuple(expected.shape))
            assert torch.equal(source.read(f"model/{name}", info.full), expected)
        assert torch.equal(source.read("model/rows", Box((1, 1), (5, 1))), values()["rows"][1:6, 1:])


def test_a_missing_rank_is_found(tmp_path: Path) -> None:
    run_world(write, 3, str(tmp_path))
    sorted(tmp_path.glob("shard-00001-*"))[0].unlink()
    with pytest.raises(CheckpointError, match=r"rows: the shards contain 8 of 14 elements"):
        open_source(tmp_path)
