"""``shardwise lint``: what it prints, exits with, ignores, repairs and refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.lint.fixes import Insert, RemoveKeyword, Replace, SetKeyword, apply_edits

HERE = Path(__file__).parent
BAD = """import torch.distributed as dist

rank = dist.get_rank()
if rank == 0:
    dist.barrier()
"""


@pytest.fixture
def lint(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwise", "lint", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code or 0, *capsys.readouterr())

    return run


def test_a_finding_has_a_place_a_fix_and_an_exit_status(lint) -> None:
    Path("a.py").write_text(BAD)
    code, out, _ = lint("a.py")
    assert code == 1
    first, second, _, last = out.rstrip("\n").split("\n")
    assert first.startswith("a.py:5:5: SW302 Only some ranks reach this barrier")
    assert second == "    fix: move the barrier out of the if" and last == "1 finding in 1 file"
    Path("b.py").write_text("print(1)\n")
    assert lint("b.py")[:2] == (0, "no findings in 1 file\n")


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("# shardwise: ignore[SW302]", 0),
        ("#  shardwise:ignore[SW101, SW3]", 0),
        ("# shardwise: ignore", 0),
        ("# noqa  # shardwise: ignore [SW302]", 0),
        ("# shardwise: ignore[SW301]", 1),
        ("# shardwise: ignore [SW301]", 1),
        ("# shardwise: ignore[SW3-1]", 1),
        ("# shardwise: ignored", 1),
        ("# shardwise: ignore-next-line", 1),
    ],
)
def test_a_comment_ignores_a_line_or_the_file(lint, comment, code) -> None:
    Path("a.py").write_text(BAD.replace("dist.barrier()", f"dist.barrier()  {comment}"))
    assert lint("a.py")[0] == code
    Path("a.py").write_text(f"{comment.replace('ignore', 'ignore-file')}\n{BAD}")
    assert lint("a.py")[0] == code
    Path("a.py").write_text(BAD.replace("rank = ", f"text = {comment!r}\nrank = "))
    assert lint("a.py")[0] == 1, "a comment in a string ignores nothing"


def test_rules_are_selected_and_ignored_by_the_beginning_of_their_id(lint) -> None:
    Path("a.py").write_text(BAD)
    assert [lint("a.py", *words)[0] for words in (["--select", "SW3"], ["--select", "SW1,SW302"])] == [1, 1]
    assert [lint("a.py", *words)[0] for words in (["--select", "SW1"], ["--ignore", "SW302"])] == [0, 0]


def test_json_and_sarif(lint) -> None:
    Path("a.py").write_text(BAD)
    code, out, _ = lint("a.py", "--json")
    read = json.loads(out)
    assert code == 1 and read["schema"] == 1 and read["files"] == 1
    one = read["findings"][0]
    assert (one["path"], one["line"], one["column"], one["rule"], one["severity"]) == ("a.py", 5, 5, "SW302", "error")
    run = json.loads(lint("a.py", "--sarif")[1])["runs"][0]
    result = run["results"][0]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "SW302"
    place = result["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "a.py"}, "region": {"startLine": 5, "startColumn": 5}}


def test_explain(lint) -> None:
    code, out, _ = lint("--explain", "SW302")
    assert code == 0 and out.startswith("SW302 barrier-on-some-ranks") and "why: A barrier ends when" in out
    assert "\n\nSW302 " in lint("--explain", "SW30")[1], "an empty line between two rules"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "PATH is missing"),
        (["nowhere.py", "a.txt"], "2 problems"),
        (["broken.py"], "line 1: "),
        (["broken.json"], "file 'broken.json' cannot be read"),
        (["broken.yaml"], "file 'broken.yaml' cannot be read"),
        (["latin.py"], "not text in UTF-8"),
        (["a.py", "--select", "SW101", "--ignore", "SW1"], "--ignore SW1 leaves none of the chosen rules"),
        (["a.py", "--select", "SW30x"], "no rule has this id or begins with it (did you mean 'SW3"),
        (["--explain", "B1"], "--explain B1: no rule has this id or begins with it"),
        (["--explain", "SW302", "a.py"], "--explain reads no files"),
        (["a.py", "--fix", "--json"], "exclude each other"),
    ],
)
def test_a_mistake_of_the_user_is_one_message(lint, words, says) -> None:
    Path("a.py").write_text(BAD)
    Path("a.txt").write_text(BAD)
    Path("broken.py").write_text("import torch\nif:\n".replace("import torch\n", "import torch if\n"))
    Path("broken.json").write_text("{")
    Path("broken.yaml").write_text("a: [")
    Path("latin.py").write_bytes(b"# torch \xe9\n")
    code, _, err = lint(*words)
    assert code == 2 and says in err and "Traceback" not in err


def test_a_folder_goes_on_past_what_cannot_be_read(lint) -> None:
    Path("in/.hidden").mkdir(parents=True)
    Path("in/venv").mkdir()
    Path("in/venv/pyvenv.cfg").touch()
    for place in ("in/a.py", "in/.hidden/b.py", "in/venv/c.py"):
        Path(place).write_text(BAD)
    Path("in/old.py").write_text("import torch\nprint 'python 2'\n")
    code, out, err = lint("in")
    assert code == 1 and "1 finding in 1 file" in out and "old.py' cannot be read: line 2" in err


def test_fix_writes_and_diff_shows(lint) -> None:
    shutil.copy(HERE / "SW107" / "bad.py", "a.py")
    before = Path("a.py").read_text()
    code, out, _ = lint("a.py", "--diff")
    assert code == 1 and "-        shuffle=True,\n" in out and Path("a.py").read_text() == before
    code, out, _ = lint("a.py", "--fix")
    assert code == 0 and out.startswith("1 fix applied\n")
    assert Path("a.py").read_text() == before.replace("        shuffle=True,\n", "")
    assert lint("a.py", "--fix")[1].startswith("0 fixes applied")
    Path("a.py").write_text(BAD)
    assert lint("a.py", "--diff") == (1, "", "1 finding in 1 file; --fix repairs none of them\n")


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("f(a)\n", SetKeyword((1, 0), "b", "1"), "f(a, b=1)\n"),
        ("f()\n", SetKeyword((1, 0), "b", "1"), "f(b=1)\n"),
        ("f(a, b=2,  c=3)\n", SetKeyword((1, 0), "b", "1"), "f(a, b=1,  c=3)\n"),
        ("f(\n    a,\n    c=3,\n)\n", SetKeyword((1, 0), "b", "1"), "f(\n    a,\n    c=3,\n    b=1,\n)\n"),
        ("f(\n    a\n)\n", SetKeyword((1, 0), "b", "1"), "f(\n    a, b=1\n)\n"),
        ("x = é.f(a, b=2)  # é\n", RemoveKeyword((1, 4), "b"), "x = é.f(a)  # é\n"),
        ("'é', f(b=2)\n", RemoveKeyword((1, 6), "b"), "'é', f()\n"),
        ("f(b=2, a=1)\n", RemoveKeyword((1, 0), "b"), "f(a=1)\n"),
        ("f(\n    a,\n    b=2,\n)\n", RemoveKeyword((1, 0), "b"), "f(\n    a,\n)\n"),
        ("f(\n    a,\n    b=2\n)\n", RemoveKeyword((1, 0), "b"), "f(\n    a\n)\n"),
        ("f(g(1), 2)\n", Replace((1, 2), (1, 6), "h"), "f(h, 2)\n"),
        ("if a:\n    # why\n    f()\n", Insert((3, 4), "g()"), "if a:\n    g()\n    # why\n    f()\n"),
        ("if a:\n\tf()\nb\n", Insert((2, 1), "g()", after=True), "if a:\n\tf()\n\tg()\nb\n"),
        ("f(a)\r\n", SetKeyword((1, 0), "b", "1"), "f(a, b=1)\r\n"),
    ],
)
def test_an_edit_keeps_the_formatting(before, edit, after) -> None:
    assert apply_edits(before, [edit]) == (after, 1)
    assert apply_edits("1\n\n\n", [edit])[1] == 0, "an edit of a place that is not there changes nothing"


def test_neither_torch_nor_libcst_is_loaded_without_need() -> None:
    words = [str(HERE / "SW302" / "good.py")]
    code = (
        "import sys; from shardwise.cli.main import main; sys.argv[:1] = ['shardwise', 'lint']"
        "\ntry:\n    main()\nexcept SystemExit:\n    pass\nprint(*{'torch', 'libcst', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "no findings in 1 file\n\n", done.stderr


def test_a_sampler_that_may_be_another_one_is_not_repaired(lint) -> None:
    text = (HERE / "SW101" / "bad.py").read_text()
    one = "    sampler = DistributedSampler(data)  # fault\n"
    either = (
        "    sampler = RandomSampler(data)\n    if dist.is_initialized():\n        sampler = DistributedSampler(data)\n"
    )
    for changed in (text.replace(one, either), text.replace("in range(2)", "in ('a', 'b')")):
        assert changed != text
        Path("a.py").write_text(changed)
        assert "SW101" in lint("a.py")[1] and lint("a.py", "--fix")[1].startswith("0 fixes applied")


def test_an_accelerator_of_another_function_is_not_written_in(lint) -> None:
    text = (HERE / "SW214" / "bad.py").read_text()
    head = "    step(model, optimizer, loader)\n\n\ndef step(model, optimizer, loader):\n"
    moved = text.replace("    for x in ", f"{head}    for x in ")
    Path("a.py").write_text(moved)
    assert "SW214" in lint("a.py")[1] and lint("a.py", "--fix")[1].startswith("0 fixes applied")


def test_a_file_with_a_byte_order_mark_is_read_and_keeps_it(lint) -> None:
    text = (HERE / "SW107" / "bad.py").read_text()
    Path("a.py").write_text(text, encoding="utf-8-sig")
    Path("a.json").write_text("{}", encoding="utf-8-sig")
    assert lint("a.json")[0] == 0 and lint("a.py", "--fix")[1].startswith("1 fix applied\n")
    assert Path("a.py").read_text() == "\ufeff" + text.replace("        shuffle=True,\n", "")


def test_what_cannot_be_read_is_no_crash(lint) -> None:
    os.mkfifo("a.py")
    Path("deep.py").write_text(f"import torch\nx = {'-' * 100_000}1\n")
    for words, says in (("a.py", "only files that end in"), ("deep.py", "it is nested too deep")):
        code, _, err = lint(words)
        assert code == 2 and says in err


def test_a_path_in_sarif_is_a_uri(lint) -> None:
    Path("a b#.py").write_text(BAD)
    place = json.loads(lint("a b#.py", "--sarif")[1])["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b%23.py"


@pytest.mark.parametrize(
    ("options", "body", "written"),
    [
        ("mixed_precision='fp16'", "loss.backward(retain_graph=True)", "a.backward(loss, retain_graph=True)"),
        ("mixed_precision='fp16'", "loss = loss / 4\nloss.backward()", None),
        ("mixed_precision='fp16'", "a.backward(loss)\nclip_grad_norm_(p, 1.0, foreach=True)", None),
        ("mixed_precision='fp16'", "a.backward(loss)\nclip_grad_norm_(p, 1.0)", "a.clip_grad_norm_(p, 1.0)"),
    ],
)
def test_a_fix_loses_no_argument(lint, options, body, written) -> None:
    head = "from accelerate import Accelerator\nfrom torch.nn.utils import clip_grad_norm_\n"
    text = f"{head}a = Accelerator({options})\n{body}\n"
    Path("a.py").write_text(text)
    assert lint("a.py")[0] == 1
    lint("a.py", "--fix")
    after = Path("a.py").read_text()
    assert after.split("\n")[-2] == written if written else after == text


def test_a_loss_divided_by_hand_needs_no_accelerator(lint) -> None:
    text = "from accelerate import Accelerator\nimport torch\na = Accelerator(gradient_accumulation_steps=4)\n"
    Path("a.py").write_text(f"{text}loss = loss / 4\nloss.backward()\n")
    assert lint("a.py")[0] == 0
