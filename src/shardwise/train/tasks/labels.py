"""Labels of rows to class numbers, checked against the classes that the model's head has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import did_you_mean
from shardwise.train.data.documents import RowProblem

_SHOWN = 10


class Labels:
    """Numbers of classes: numbers as they are, names by the model's ``label2id``, else in alphabetical order.

    ``number`` is how many classes the head has, ``None`` for a factory's model, which is not known to have a head.
    """

    def __init__(self, facts: Any, names: Sequence[str] | None = None) -> None:
        self.number: int | None = getattr(facts, "num_labels", None)
        known: Mapping[str, int] = getattr(facts, "label2id", None) or {}
        own = bool(known) and not all(re.fullmatch(r"LABEL_\d+", str(name)) for name in known)
        self.known = {str(name): int(number) for name, number in known.items()} if own else {}
        self.names = tuple(names or ())  # of the numbers in a data set that has some
        self.found: dict[str, int] = {}
        self.highest = -1

    def identity(self) -> list[Any]:
        """Return what numbers depend on, beside the rows."""
        return [self.number, sorted(self.known.items()), self.names]

    def number_of(self, value: Any, *, what: str = "label") -> int:
        """Return the class of a value.

        Raises:
            RowProblem: there is none, or the head has no such class.
        """
        if value is None or (isinstance(value, str) and not value.strip()):
            raise RowProblem(f"has no {what}; add it, or remove the row")
        if isinstance(value, str) and value.strip().isdecimal() and value not in self.known:
            value = int(value)
        if isinstance(value, float | np.floating) and float(value).is_integer():
            value = int(value)
        if isinstance(value, str):
            return self._named(value, what)
        if not isinstance(value, int | np.integer):
            raise RowProblem(f"has the {what} {value!r:.40}, which is neither a class number nor a name")
        number = int(value)
        if self.known and 0 <= number < len(self.names):
            return self._named(self.names[number], what)
        if number < 0 or (self.number is not None and number >= self.number):
            has = "0 or more" if self.number is None else f"0 to {self.number - 1}: the head has {self.number} classes"
            raise RowProblem(f"has the {what} {number}, and classes are {has} (num_labels)")
        if self.found:
            raise RowProblem(f"has the {what} {number}, where other rows have names; use one of the two")
        self.highest = max(self.highest, number)
        return number

    def _named(self, name: str, what: str) -> int:
        if self.known:
            if name not in self.known:
                some = ", ".join(list(self.known)[:_SHOWN])
                hint = did_you_mean(name, self.known)
                raise RowProblem(f"has the {what} '{name:.40}', which is none of the model's label2id ({some}){hint}")
            return self.known[name]
        if self.highest >= 0:
            raise RowProblem(f"has the {what} '{name:.40}', where other rows have numbers; use one of the two")
        if name not in self.found:
            if self.number is not None and len(self.found) >= self.number:
                some = ", ".join(sorted(self.found)[:_SHOWN])
                raise RowProblem(
                    f"has the {what} '{name:.40}', a class more than the {self.number} of the head (num_labels); "
                    f"rows before it have {some}"
                )
            self.found[name] = len(self.found)
        return self.found[name]

    def finish(self) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
        """Return the names of the classes, and the final number of each number given so far, if they differ."""
        if self.known:
            return tuple(sorted(self.known, key=lambda name: self.known[name])), None
        if not self.found:
            return self.names, None
        names = tuple(sorted(self.found))
        order = np.empty(len(names), np.int64)
        for place, name in enumerate(names):
            order[self.found[name]] = place
        return names, order

    @property
    def num_classes(self) -> int:
        """Number of classes: those of the head, or those found."""
        return self.number or max(len(self.found), self.highest + 1, len(self.names))
