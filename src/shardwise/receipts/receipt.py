"""`Receipt`: planned and observed effects, line by line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from shardwise.errors import ReceiptError


class Line(BaseModel):
    """Claim of a receipt.

    ``ok`` is ``None`` for one that is only reported, as it cannot be checked.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    planned: str
    found: str
    ok: bool | None = True


class Receipt(BaseModel):
    """Receipt with a title and claims; it is valid if no line is false."""

    model_config = ConfigDict(frozen=True)

    title: str
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """True if no claim was found false."""
        return all(line.ok is not False for line in self.lines)

    def require(self) -> None:
        """Raise `ReceiptError` with every line that is false."""
        wrong = [
            f"{self.title}: {line.name}: planned {line.planned}, found {line.found}"
            for line in self.lines
            if line.ok is False
        ]
        if wrong:
            raise ReceiptError("\n".join(wrong))

    def to_dict(self) -> dict[str, object]:
        """Return the entry in the JSON document of a run."""
        return {"ok": self.ok, "lines": [line.model_dump() for line in self.lines]}
