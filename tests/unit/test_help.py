"""``--help``: each verb is listed with its whole sentence, however narrow the terminal."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shardwise.cli.main import _VERBS, app


@pytest.mark.parametrize("width", [50, 80, 200])
@pytest.mark.parametrize("group", ["", "bench", "checkpoint"])
def test_no_sentence_is_cut(group: str, width: int) -> None:
    words = [*group.split(), "--help"]
    found = CliRunner().invoke(app, words, terminal_width=width)
    assert found.exit_code == 0
    shown = "".join(found.stdout.split())  # a line may end behind a hyphen
    verbs = {name: text for name, (_, _, text) in _VERBS.items() if name.rpartition(" ")[0] == group}
    assert verbs
    for name, text in verbs.items():
        sentence = text.partition("\n\n")[0]
        assert "".join(f"{name.rpartition(' ')[2]} {sentence}".split()) in shown
