"""``shardwise checkpoint inspect`` and ``verify`` as a user runs them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from shardwise.checkpoint.format import MANIFEST
from shardwise.checkpoint.inspect import Damage, Inspection, TensorLine
from shardwise.checkpoint.storage.local_storage import folder_of
from shardwise.cli.main import main
from shardwise.report.checkpoint_table import SHOWN, ReadProgress, print_damage, print_inspection
from tests.checkpoints import full_tensors, write_checkpoint
from tests.s3 import BUCKET, Store, serve

SECOND = "rank-00001.safetensors"


def command(capsys: pytest.CaptureFixture[str], *words: str, exit_code: int = 0) -> tuple[str, str]:
    """The command in this process; returns stdout and stderr."""
    code = 0
    with mock.patch.object(sys, "argv", ["shardwise", "checkpoint", *words]):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    out, err = capsys.readouterr()
    assert code == exit_code, f"exit code {code}\n{out}\n{err}"
    return out, err


def answer(capsys: pytest.CaptureFixture[str], *words: str, exit_code: int = 0) -> dict[str, Any]:
    out, _ = command(capsys, *words, "--json", exit_code=exit_code)
    assert out.count("\n") == 1, "the document and nothing else"
    document: dict[str, Any] = json.loads(out)
    return document


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_inspect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", 10)
    path = write_checkpoint(tmp_path / "checkpoints", 20)
    out, err = command(capsys, "inspect", str(tmp_path))
    assert err == ""
    for line in (
        f"checkpoint: {path} (Shardwise checkpoint)",
        "step: 20, loss 2.2500, saved 2026-01-02T03:04:05+00:00",
        "model: package.module:build(width=4)",
        "data: position 160, 5.1 k tokens",
        "written by: shardwise 0.1.0, torch 2.13.0; schema 2",
        "optimizer: AdamW, 1 group (lr 0.001, betas [0.9, 0.99])",
        "random states: cpu, numpy of 2 ranks",
        "tied: model/head.weight = model/embed.weight",
        "also there: step-00000010",
    ):
        assert line in out.splitlines(), line
    assert "plan: fsdp, on 2 ranks, bf16 (" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["blocks.{0…1}.weight"] == ["blocks.{0…1}.weight", "2", "×", "F32", "4", "×", "6", "192", "B", "4"]
    assert rows["embed.weight"] == ["embed.weight", "F32", "7", "×", "4", "112", "B", "2"]
    assert rows["exp_avg"] == ["exp_avg", "3", "×", "F32", "as", "the", "parameter", "304", "B", "6"]
    assert rows["step"] == ["step", "4", "×", "F32", "0-d", "16", "B", "4"]
    assert "rng" not in out


def test_inspect_all_has_a_row_for_each_tensor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    out, _ = command(capsys, "inspect", "--all", str(path))
    names = {line.split()[0] for line in out.splitlines() if line}
    assert {name.split("/", 1)[1] for name in full_tensors()} <= names


def test_inspect_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    document = answer(capsys, "inspect", str(path))
    full = full_tensors()
    assert document["schema"] == 1 and document["place"] == str(path) and document["step"] == 20
    assert document["loss"] == 2.25 and document["strategy"] == "fsdp" and document["precision"] == "bf16"
    assert document["ranks"] == 2 and document["data_position"] == 160 and document["tokens"] == 5120
    assert document["bytes"] == sum(tensor.nbytes for tensor in full.values())
    assert {item["name"]: item["shape"] for item in document["tensors"]} == {n: list(t.shape) for n, t in full.items()}
    assert document["rng"] == {"0": ["cpu", "numpy"], "1": ["cpu", "numpy"]}
    assert document["files"][SECOND] == (path / SECOND).stat().st_size
    assert document["damage"] == [] and document["optimizer"]["groups"][0]["options"]["lr"] == 0.001


def test_long_tables_are_folded() -> None:
    lines = [
        TensorLine(f"model/kind{chr(97 + n // 26)}{chr(97 + n % 26)}.w", "F32", (n,), 4 * n, 1) for n in range(1, 61)
    ]
    lines += [TensorLine(f"model/layers.{n}.experts.{m}.w", "BF16", (2,), 4, 3) for n in range(12) for m in range(8)]
    found = Inspection("test", "here", lines)
    for everything, rows in ((False, 30), (True, 156)):
        text = io.StringIO()
        print_inspection(found, Console(file=text, width=120), everything=everything)
        shown = [line for line in text.getvalue().splitlines() if ".w" in line]
        assert len(shown) == rows
        assert ("and 31 more kinds (--all)" in text.getvalue()) != everything
        assert "156" in text.getvalue() and str(60 + 12 * 8 * 3) in text.getvalue(), "the sums are of all"
    text = io.StringIO()
    print_inspection(Inspection("test", "here", lines[60:]), Console(file=text, width=120))
    assert "layers.{0…11}.experts.{0…7}.w  96 ×  BF16" in text.getvalue()


def test_much_damage_is_counted() -> None:
    text = io.StringIO()
    print_damage([Damage(f"f{n}", "is missing", ("[a]",)) for n in range(SHOWN + 3)], Console(file=text, width=120))
    lines = text.getvalue().splitlines()
    assert lines[0] == "✗ f0: is missing ([a])" and lines[-1] == "  and 3 more in --json" and len(lines) == SHOWN + 1


def test_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    out, err = command(capsys, "verify", str(tmp_path))
    assert out.splitlines()[0] == f"checkpoint: {path} (Shardwise checkpoint, step 20)" and err == ""
    assert "✓ every byte is what was saved" in out and "read: 18 tensors in 2 files, 674 B in " in out
    document = answer(capsys, "verify", str(path))
    assert document["ok"] and document["hashed"] and document["bytes"] == 674 and document["damage"] == []


def test_damage_ends_with_1_and_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    flip(path / SECOND, (path / SECOND).stat().st_size - 1)
    last = "rng/1/numpy"
    out, err = command(capsys, "verify", str(path), exit_code=3)
    assert f"✗ {SECOND}: bytes are not those that were saved ({last})" in out and "✓" not in out
    assert err == (
        f"shardwise: '{path}' is damaged, as is said above; restore the files from a copy, or go on from an earlier "
        "checkpoint\n"
    )
    document = answer(capsys, "verify", str(path), exit_code=3)
    assert document["damage"] == [{"file": SECOND, "what": "bytes are not those that were saved", "tensors": [last]}]
    assert not document["ok"]
    command(capsys, "inspect", str(path))  # sizes are right, and data is not looked at
    (path / SECOND).unlink()
    for verb in ("inspect", "verify"):
        out, _ = command(capsys, verb, str(path), exit_code=3)
        assert f"✗ {SECOND}: is missing (model/embed.weight, " in out
        assert answer(capsys, verb, str(path), exit_code=3)["damage"][0]["file"] == SECOND
    (path / MANIFEST).write_bytes(b"{")
    for verb in ("inspect", "verify"):
        out, _ = command(capsys, verb, str(path), exit_code=3)
        assert f"✗ {MANIFEST}: " in out
        assert answer(capsys, verb, str(path), exit_code=3)["damage"][0]["file"] == MANIFEST


def test_another_tools_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_file({"layers.0.w": torch.ones(3, 2), "layers.1.w": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    out, _ = command(capsys, "inspect", str(tmp_path))
    assert "(Hugging Face folder)" in out and "layers.{0…1}.w  2 ×  F32" in out
    assert answer(capsys, "inspect", str(tmp_path))["step"] is None
    out, _ = command(capsys, "verify", str(tmp_path))
    assert "note: this format has no hashes: everything could be read" in out and "✓" not in out
    assert answer(capsys, "verify", str(tmp_path))["hashed"] is False


def test_a_users_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for verb in ("inspect", "verify"):
        _, err = command(capsys, verb, str(tmp_path / "nothing"), exit_code=2)
        assert err.startswith(f"shardwise: '{tmp_path}/nothing' does not exist; give ")
        _, err = command(capsys, verb, "nonsense://x", exit_code=2)
        assert err.startswith("shardwise: 'nonsense://x': ")


@pytest.mark.skipif(not hasattr(sys, "platform") or sys.platform == "win32", reason="permissions of POSIX")
def test_a_folder_that_may_not_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    with mock.patch("os.scandir", side_effect=PermissionError(13, "Permission denied", str(path))):
        for verb in ("inspect", "verify"):
            _, err = command(capsys, verb, str(path), exit_code=2)
            assert err == f"shardwise: '{path}' cannot be read: Permission denied; give a place you may read\n"


def test_progress_on_a_terminal_and_nowhere_else() -> None:
    for terminal in (True, False):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=100, _environ={"TERM": "xterm"})  # not a dumb one
        with ReadProgress(console) as progress:
            progress.begin(100)
            progress.tick(40)
            if terminal:
                progress._bar.refresh()
        assert ("40/100 bytes" in text.getvalue()) == terminal
        assert terminal or text.getvalue() == ""


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with serve() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


def test_on_a_server(capsys: pytest.CaptureFixture[str], s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/run"
    path = write_checkpoint(folder_of(f"{url}/checkpoints"))
    assert answer(capsys, "inspect", url)["place"] == str(path) == f"{url}/checkpoints/step-00000020"
    assert answer(capsys, "verify", url)["ok"]
    key = f"run/checkpoints/step-00000020/{SECOND}"
    data = s3.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
    s3.client().put_object(Bucket=BUCKET, Key=key, Body=data[:-1] + b"?")
    assert answer(capsys, "verify", url, exit_code=3)["damage"][0]["tensors"] == ["rng/1/numpy"]
    s3.client().delete_object(Bucket=BUCKET, Key=key)
    assert answer(capsys, "inspect", url, exit_code=3)["damage"][0]["what"] == "is missing"
    _, err = command(capsys, "inspect", "s3://no-such-bucket/run", exit_code=2)
    assert "there is no such bucket" in err
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    s3.forget()
    _, err = command(capsys, "verify", url, exit_code=2)
    assert "no valid credentials" in err


LOADED = "from shardwise.cli.main import main\nimport sys\ntry:\n    main()\nfinally:\n    print(*sys.modules)"


def test_help_has_an_example_and_loads_nothing_heavy() -> None:
    for verb in ("inspect", "verify", "convert"):
        done = subprocess.run(
            [sys.executable, "-c", LOADED, "checkpoint", verb, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert f"Example: shardwise checkpoint {verb} " in done.stdout
        loaded = set(done.stdout.splitlines()[-1].split())
        assert "shardwise.cli.main" in loaded and not loaded & {"torch", "numpy", "safetensors", "upath", "fsspec"}
