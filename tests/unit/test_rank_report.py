"""A rank's report arrives although the folder it belongs in cannot be written."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import MachineError
from shardwise.launch.rank import RankReport, spare


def test_report_survives_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "full" / "rank-1.error.json"  # the folder is not there: no write can succeed, not even root's
    report = RankReport.of(MachineError("the disk is full"), 1)
    report.write(path)
    try:
        assert spare(path).exists()
        assert RankReport.read(path) == report
    finally:
        spare(path).unlink()
    assert RankReport.read(path) is None


def test_its_own_place_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.error.json"
    report = RankReport.of(MachineError("no"), 0)
    report.write(path)
    assert path.exists()
    assert not spare(path).exists()
    assert RankReport.read(path) == report
