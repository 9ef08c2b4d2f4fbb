"""One process of ``verify`` is one process: what a model asks of its ranks there is not answered with theirs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.gradcheck.run import StrategyResult
from tests.cli import configs
from tests.cli.test_verify import verify
from tests.models import ByteDecoder
from tests.verifying import rows_of, task_for
from tests.worlds import run_world

HERE = "tests.world.test_verify_reference"
STRATEGIES = ("ddp", "fsdp")


def times_world_size(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * dist.get_world_size()


def times_world_size_if_any(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (dist.get_world_size() if dist.is_initialized() else 1)


class Scaled(ByteDecoder):
    """Its embedding's output has a gradient that is multiplied by the number of ranks."""

    def __init__(self, hook: Any) -> None:
        super().__init__(0.0)
        self.hook = hook

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x.register_hook(self.hook)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def asks_for_ranks() -> nn.Module:
    return Scaled(times_world_size)


def asks_whether_there_are_ranks() -> nn.Module:
    return Scaled(times_world_size_if_any)


class Talks(ByteDecoder):
    """Every forward adds something up over the ranks."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__(0.0)
        self.guarded = guarded

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        if not self.guarded or dist.is_initialized():
            mean = x.detach().mean()
            dist.all_reduce(mean)
            x = x - mean
        return x


def talks() -> nn.Module:
    return Talks(guarded=False)


def talks_if_it_can() -> nn.Module:
    return Talks(guarded=True)


def raises() -> nn.Module:
    class Raises(ByteDecoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if ids.device.type != "meta" and not isinstance(ids, torch._subclasses.FakeTensor):
                raise RuntimeError("not today")
            return super().forward(ids)

    return Raises(0.0)


def rows(folder: Path, factory: str, *strategies: str) -> list[StrategyResult]:
    task = task_for(folder, *strategies, nproc=2, model={"factory": f"{HERE}:{factory}"})
    first, second = run_world(rows_of, 2, task)
    assert [row.status for row in first] == [row.status for row in second]
    return first


@pytest.mark.turns(2)
@pytest.mark.parametrize("factory", ["asks_for_ranks", "asks_whether_there_are_ranks"])
def test_a_gradient_times_the_number_of_ranks_is_not_that_of_one_process(tmp_path: Path, factory: str) -> None:
    for row in rows(tmp_path, factory, *STRATEGIES):
        assert row.status == "failed" and row.verdict is not None
        assert row.verdict.differing == 1
        assert row.verdict.first is not None and row.verdict.first.name == "embed.weight"


@pytest.mark.parametrize("factory", ["talks", "talks_if_it_can"])
def test_a_model_that_talks_to_other_ranks_is_refused_by_name_and_nobody_waits(tmp_path: Path, factory: str) -> None:
    started = time.monotonic()
    for row in rows(tmp_path, factory, *STRATEGIES):
        assert row.status == "refused"
        assert "the model itself talks to other ranks (allreduce) in its forward or backward" in row.reason
    assert time.monotonic() - started < 120


def test_the_command_says_no_and_names_the_parameter(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path, model={"factory": f"{HERE}:asks_whether_there_are_ranks"}))
    out, err = verify(config, "--strategy", "ddp", "--nproc", "2", exit_code=1)
    assert "first: embed.weight is off by" in out
    assert "ddp on 2 ranks: not verified" in err


def test_what_the_model_raises_in_one_process_is_one_sentence(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path, model={"factory": f"{HERE}:raises"}))
    _, err = verify(config, "--strategy", "ddp", "--nproc", "2", exit_code=2)
    assert "one process alone cannot compute the model's gradient: RuntimeError: not today" in err
    assert "Traceback" not in err
