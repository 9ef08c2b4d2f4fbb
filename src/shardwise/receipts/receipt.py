"""`Receipt`: planned and taken effect, line by line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from shardwise.errors import ReceiptError


class Line(BaseModel):
    """One claim. ``ok`` is ``None`` for something that is only told, because nothing here can check it."""

    model_config = ConfigDict(frozen=True)

    name: str
    planned: str
    found: str
    ok: bool | None = True


class Receipt(BaseModel):
    """A titled list of claims; it holds when no line is false."""

    model_config = ConfigDict(frozen=True)

    title: str
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """True when no claim was found false."""
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
        """For the JSON document of a run."""
        return {"ok": self.ok, "lines": [line.model_dump() for line in self.lines]}
