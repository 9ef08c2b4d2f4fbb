"""``shardwise verify`` as its users call it: the table, the JSON document, the exit codes, the session of its page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import PlanError
from tests.cli import configs
from tests.cli.test_docs_sessions import fits
from tests.cli.test_readme import masked
from tests.commands import shardwise
from tests.verifying import prepared

PAGE = (configs.ROOT / "docs" / "verify.md").read_text()
SESSIONS = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE)
ERROR = re.compile(r"\d(\.\d)?e-\d\d")


def verify(*words: str, exit_code: int = 0) -> tuple[str, str]:
    """Run to the end; returns stdout and stderr."""
    done = shardwise("verify", *words, exit_code=exit_code)
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_conversations_whose_short_samples_have_no_label(tmp_path: Path) -> None:
    """Isolated in a row, so that the model takes a dict; the answers lie beyond the samples that verify compares."""
    from tests.world.test_added_tokens import base

    folder = base(tmp_path / "base", tied=False)
    data = {"path": str(tmp_path / "chats.jsonl"), "chat_template": "chatml", "seq_len": 64, "heldout_fraction": 0.0}
    model = {"config": str(folder), "weights": str(folder), "factory": None}
    config = str(configs.write_config(tmp_path, model=model, data=data, train={"eval_samples": None}))
    out, _ = verify(config, "--strategy", "fsdp", "--strategy", "ddp+tp2", "--nproc", "2", "--json")
    document = json.loads(out.splitlines()[-1])
    assert [row["status"] for row in document["rows"]] == ["verified", "verified"], document["rows"]


def test_the_document_and_the_table(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path))
    words = ["--strategy", "fsdp", "--strategy", "ddp", "--strategy", "ddp+tp2", "--nproc", "2", "--json"]
    out, err = verify(config, *words, "optimizer.name=sgd")
    document = json.loads(out.splitlines()[-1])
    assert document["schema"] == 1
    assert document["verified"] is True
    assert document["failure"] is None
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == ["fsdp", "ddp", "ddp+tp2"]
    for name in ("fsdp", "ddp"):
        assert rows[name]["status"] == "verified"
        assert rows[name]["gradient_error"] < rows[name]["tolerance"] <= 1e-8
        assert rows[name]["norm_error"] < rows[name]["tolerance"]
        assert rows[name]["receipts"]["effects"]["ok"]
        assert rows[name]["receipts"]["fit"]["ok"]
    assert rows["ddp+tp2"]["status"] == "refused"
    assert rows["ddp+tp2"]["reason"]
    assert document["model"]["parameters"] < document["model"]["own_parameters"]
    assert "2 of 3 blocks of 'blocks'" in err
    assert "dropout 0 instead of dropout 0.1" in err
    assert "not for this model" in err


def test_strategies_that_cannot_be_are_all_said_at_once(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path))
    _, err = verify(config, "--strategy", "fsdpp", "--strategy", "zero1+tp2", "--strategy", "fsdp+lora", exit_code=2)
    assert "3 problems" in err
    assert "did you mean 'fsdp'?" in err
    assert not (tmp_path / "run").exists(), "nothing is read before"


def test_a_model_that_allows_nothing_that_was_asked_for(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path))
    _, err = verify(config, "--strategy", "ddp+tp2", "--nproc", "2", exit_code=2)
    assert "ddp+tp2 on 2 ranks:" in err


def test_a_wrong_forward_on_one_rank_is_exit_1(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path, model={"factory": "tests.cli.test_verify:differs_by_rank"}))
    out, err = verify(config, "--strategy", "ddp", "--nproc", "2", exit_code=1)
    assert "NOT the gradient of one process" in out
    assert "first: scale is off by" in out
    assert "the forward itself differs, though no axis of ddp cuts it" in out
    assert "ddp on 2 ranks: not verified; what differs stands above" in err


def test_a_rank_that_dies_is_exit_3_and_what_was_found_before_is_shown(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path, model={"factory": "tests.cli.test_verify:dies_on_rank_1"}))
    out, err = verify(config, "--strategy", "ddp", "--strategy", "fsdp", "--nproc", "2", exit_code=3)
    assert "fsdp on 2 ranks: rank 1 ended with exit code 7" in err
    assert re.search(r"ddp .* verified", out)


def test_a_model_that_no_split_can_give_the_gradient_of(tmp_path: Path) -> None:
    config = str(configs.write_config(tmp_path, model={"factory": "tests.cli.test_verify:batch_norm"}))
    _, err = verify(config, "--strategy", "ddp", "--nproc", "2", exit_code=2)
    assert "one process alone does not reproduce this model's gradient" in err
    assert "batch norm" in err


def differs_by_rank() -> Any:
    """The decoder with a scale of each rank's own: a setting that was read from a file that differs, say."""
    import os

    from tests.models import ByteDecoder

    class Differs(ByteDecoder):
        def forward(self, ids: Any) -> Any:
            return super().forward(ids) * (1.0 + 0.25 * int(os.environ.get("RANK", "0")))

    return Differs(0.0)


def dies_on_rank_1() -> Any:
    """The decoder; one under FSDP ends rank 1 without a word."""
    import os

    from tests.models import ByteDecoder

    class Dies(ByteDecoder):
        def forward(self, ids: Any) -> Any:
            from torch.distributed.fsdp import FSDPModule

            if isinstance(self, FSDPModule) and os.environ.get("RANK") == "1":
                os._exit(7)
            return super().forward(ids)

    return Dies(0.0)


def batch_norm() -> Any:
    """A decoder whose samples depend on each other."""
    from torch import nn

    from tests.models import WIDTH, ByteDecoder

    class Normed(ByteDecoder):
        def __init__(self) -> None:
            super().__init__(0.0)
            self.normed = nn.BatchNorm1d(WIDTH)

        def forward(self, ids: Any) -> Any:
            x = self.normed(self.embed(ids).transpose(1, 2)).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            return self.head(x * self.scale)

    return Normed()


def test_a_model_that_is_too_large_for_float64_here_is_refused() -> None:
    from shardwise.errors import ModelError
    from shardwise.gradcheck.shrink import Recipe, Shrunk
    from shardwise.run.strategy_lineup import check_memory

    large = Shrunk(
        recipe=Recipe(), num_parameters=10**13, was_parameters=10**13, changes=(), kept=("widths are unchanged",)
    )
    with pytest.raises(
        ModelError, match=r"for 4 copies of 10000000000000 parameters in float64.*: widths are unchanged"
    ):
        check_memory(large, 4)


def test_what_is_verified_if_nothing_is_asked_for(tmp_path: Path) -> None:
    found = prepared(tmp_path, nproc=4, parallel={"strategy": "auto"})
    (world,) = found.lineup.plans
    names = [plan.strategy for plan in found.lineup.plans[world]]
    assert world == 4
    assert {"ddp", "zero1", "zero2", "fsdp", "hsdp"} <= set(names)
    assert len(names) == len(set(names))
    for plan in found.lineup.plans[world]:
        dims = plan.dims
        assert plan.grad_accum not in {dims.dp, dims.tp, dims.pp, dims.cp}, "a factor would have two causes"


@pytest.mark.parametrize(("strategy", "world"), [("fsdp", 2), ("hsdp", 4), ("fsdp+tp2", 4), ("ddp+tp4+pp2", 8)])
def test_a_strategy_of_the_config_has_the_ranks_that_it_needs(strategy: str, world: int) -> None:
    from shardwise.run.strategy_lineup import WORLDS, world_for

    assert world_for(strategy, WORLDS) == world
    assert world_for(strategy, (6,)) == 6


@pytest.mark.turns(6)
@pytest.mark.parametrize(("command", "expected"), SESSIONS, ids=[command[:60] for command, _ in SESSIONS])
def test_the_sessions_of_the_page(command: str, expected: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace("runs/stdlib", str(tmp_path / "run")))
    assert words[:2] == ["shardwise", "verify"]
    out, _ = verify(*words[2:])
    wrong = fits(without_errors(out), without_errors(expected))
    assert not wrong, f"{wrong}\n{out}"


def without_errors(text: str) -> list[str]:
    """The lines, as `masked` has them, without figures of rounding."""
    return masked(ERROR.sub("#", text))


def test_the_page_has_sessions() -> None:
    assert SESSIONS


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"parallel": {"strategy": "fsdp+lora"}}, "'fsdp\\+lora': verify compares all gradients"),
        (
            {"parallel": {"strategy": "fsdp"}, "optimizer": {"in_backward": True, "clip_norm": "none"}},
            "optimizer.in_backward frees each gradient",
        ),
    ],
)
def test_what_leaves_no_gradient_of_the_whole_model_to_compare_is_refused(
    tmp_path: Path, tables: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        prepared(tmp_path, nproc=2, **tables)
