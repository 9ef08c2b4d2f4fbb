"""A receipt holds when no line is false, and says which ones are."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from shardwise.errors import AnswerIsNo, ReceiptError
from shardwise.receipts.receipt import Line, Receipt

TRUE = Line(name="ranks", planned="2", found="2")
FALSE = Line(name="precision", planned="bf16", found="fp32", ok=False)
ALSO_FALSE = Line(name="blocks", planned="3", found="none", ok=False)
TOLD = Line(name="peak", planned="not predicted", found="1 GiB", ok=None)


def receipt(*lines: Line) -> Receipt:
    return Receipt(title="effects", lines=lines)


@pytest.mark.parametrize(
    ("lines", "ok"),
    [((), True), ((TRUE,), True), ((TRUE, TOLD), True), ((TRUE, FALSE), False), ((FALSE, TRUE), False)],
)
def test_it_holds_when_no_line_is_false(lines, ok):
    made = receipt(*lines)
    assert made.ok is ok
    if ok:
        made.require()
    else:
        with pytest.raises(ReceiptError):
            made.require()


def test_what_is_false_is_told_and_nothing_else():
    with pytest.raises(ReceiptError) as raised:
        receipt(TRUE, FALSE, TOLD, ALSO_FALSE).require()
    assert str(raised.value).splitlines() == [
        "effects: precision: planned bf16, found fp32",
        "effects: blocks: planned 3, found none",
    ]
    assert isinstance(raised.value, AnswerIsNo) and raised.value.exit_code == 1


def test_a_receipt_is_json():
    document = json.loads(json.dumps(receipt(TRUE, FALSE, TOLD).to_dict()))
    assert document == {
        "ok": False,
        "lines": [
            {"name": "ranks", "planned": "2", "found": "2", "ok": True},
            {"name": "precision", "planned": "bf16", "found": "fp32", "ok": False},
            {"name": "peak", "planned": "not predicted", "found": "1 GiB", "ok": None},
        ],
    }
    assert receipt(TRUE).to_dict()["ok"] is True


def test_a_receipt_cannot_be_changed_afterwards():
    made = receipt(FALSE)
    with pytest.raises(ValidationError):
        made.lines[0].ok = True
    with pytest.raises(ValidationError):
        made.lines = ()
