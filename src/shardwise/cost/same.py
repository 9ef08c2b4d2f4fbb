"""`Same`: a large value as a key of caches."""

from __future__ import annotations

from typing import Generic, TypeVar

Value = TypeVar("Value")


class Same(Generic[Value]):
    """A value that is equal only to itself, and that a cache's key keeps alive.

    Hashing the contents of a profile, a unit or a cluster would cost more than the cache saves.
    """

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
