"""Read pickle streams of other tools' checkpoints without running any code in them.

Python's object streams are small programs: they name functions and call them. Here the opcodes, decoded by the
standard library, are interpreted over the table in `inert`: a name that is in it becomes a plain value or a call of
a function of ours, any other name is rejected. The memory needed is bounded by a multiple of the stream's length.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator
from typing import IO, Any

from shardwise.checkpoint.format import short_list
from shardwise.checkpoint.readers.inert import (
    InertRecord,
    Maker,
    StoredStorage,
    StoredTensor,
    Unreadable,
    check_key,
    look_up,
)
from shardwise.errors import CheckpointError

__all__ = ["InertRecord", "StoredStorage", "StoredTensor", "load_from_stream", "load_restricted", "printable"]

MAX_BYTES = 1 << 31  # of one stream
_MAX_NUMBER = 1 << 10  # bytes of one integer
_MAX_DEPTH = 100
_CONTAINERS = (dict, list, tuple, set, frozenset, InertRecord)
_COUNTED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_SAVE_AGAIN = (
    "If you trust the file, open it with the tool that wrote it and save it again with nothing but tensors, numbers "
    "and text, as torch.save(model.state_dict(), ...) does"
)
_HINTS = {  # fix, by prefix of the rejected name
    "torch.nn.modules.": (
        "It contains a full model with its code; if you trust it, open it with torch and save model.state_dict()"
    ),
    "torch.distributed.tensor.": (
        "It contains DTensors, one rank's shard to a file; save full_tensor() of each, or a PyTorch DCP folder"
    ),
    "torch.storage._load_from_bytes": "It contains tensors not written by torch.save; save them again with torch.save",
    "omegaconf.": (
        "It contains a config of OmegaConf; if you trust it, save it again with OmegaConf.to_container(config) instead"
    ),
}
Persistent = Callable[[Any], Any]


def load_restricted(data: bytes, where: str, persistent: Persistent | None = None) -> Any:
    """Parse the object in ``data`` into plain and inert values.

    These are dicts, lists, tuples, sets, numbers, text, bytes, `InertRecord` and `StoredTensor`. ``where`` is the file
    as messages name it. ``persistent`` turns the stream's external references (torch's storages) into values. The
    result has no cycles, is at most 100 levels deep, and walking all of it takes time in proportion to the stream.

    Raises:
        CheckpointError: the stream is damaged, or names something that is not among the known values.
    """
    return load_from_stream(io.BytesIO(data), len(data), where, persistent)


def load_from_stream(stream: IO[bytes], size: int, where: str, persistent: Persistent | None = None) -> Any:
    """Like `load_restricted`, from the position of ``stream``, which moves past the object.

    ``size`` is the number of bytes available; ``stream.read`` must not allocate more than that.
    """
    if size > MAX_BYTES:
        raise CheckpointError(f"'{where}' has {size} bytes of objects other than tensors, {MAX_BYTES} can be read")
    problem: Exception | None = None
    machine = _Machine(16 * size + (1 << 20), where, persistent)
    try:
        result = machine.run(stream)
        _check_nesting(result, 16 * size + (1 << 20))
    except Exception as error:  # a hostile stream can cause nearly any error; all of them mean the same
        problem = error
    else:
        if not machine.refused:
            return result
    if machine.refused:
        raise CheckpointError(_refusal(where, list(machine.refused))) from None
    if isinstance(problem, CheckpointError):
        raise problem from None
    if isinstance(problem, Unreadable):
        raise CheckpointError(f"'{where}' cannot be read: {printable(str(problem))}") from None
    what = printable(f"{type(problem).__name__}: {problem}")
    raise CheckpointError(f"'{where}' is damaged ({what}, before byte {machine.place}); copy or save it again")


def _refusal(where: str, names: list[str]) -> str:
    wants = short_list([f"'{printable(name)}'" for name in names])
    hints = [hint for start, hint in _HINTS.items() if any(name.startswith(start) for name in names)]
    return (
        f"'{where}' asks to run or to make what is not plain data; it was refused and not run: {wants}\n"
        f"{hints[0] if hints else _SAVE_AGAIN}"
    )


def printable(text: str, limit: int = 300) -> str:
    """Return one line without control characters, truncated to ``limit`` characters."""
    short = text if len(text) <= limit else text[:limit] + "..."
    return short if short.isprintable() else short.encode("unicode_escape").decode("ascii")


class _Machine:
    """Stack, marks and memo of one stream; ``refused`` lists the unknown names, in order."""

    def __init__(self, budget: int, where: str, persistent: Persistent | None) -> None:
        self.where = where
        self.persistent = persistent
        self.refused: dict[str, None] = {}
        self.place = 0
        self._budget = budget
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, stream: IO[bytes]) -> Any:
        for opcode, argument, place in pickletools.genops(stream):
            name = opcode.name
            self.place = place or 0
            if name in _LITERALS:
                self._stack.append(argument)
            elif name == "STOP":
                return self._stack.pop()
            else:
                _ACTIONS[name](self, argument)
        raise ValueError("the stream has no end")

    # values

    def push_number(self, number: int) -> None:
        if number.bit_length() > 8 * _MAX_NUMBER:
            raise ValueError(f"a number of {number.bit_length()} bits")
        self._stack.append(number)

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def drop(self, _items: list[Any]) -> None:
        """Discard values taken from the stack."""

    def from_mark(self) -> list[Any]:
        """Pop the values since the last mark, and the mark."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def take(self, count: int) -> tuple[Any, ...]:
        """Pop the last ``count`` values, in the order they were pushed."""
        if len(self._stack) < count:
            raise IndexError("the stack is too short")
        values = tuple(self._stack[-count:])
        del self._stack[-count:]
        return values

    def mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.from_mark()

    def duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    # containers

    def append(self, items: list[Any]) -> None:
        self._members(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        self._members(dict).update(_pairs(items))

    def add_items(self, items: list[Any]) -> None:
        self._members(set).update(map(check_key, items))

    def _members(self, kind: type[Any]) -> Any:
        """Return the container on top of the stack, or the one with the top record's members."""
        target = self._stack[-1]
        if isinstance(target, InertRecord):
            if target.items is None:
                target.items = kind()
            target = target.items
        if not isinstance(target, kind):
            raise TypeError(f"members are put into a {type(target).__name__} as into a {kind.__name__}")
        return target

    # names and calls

    def name(self, module: Any, name: Any) -> Any:
        """Resolve a name.

        An unknown one builds records until the end, so that all can be reported.
        """
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        known = look_up(module, name)
        if known is not None:
            return known
        full = f"{module}.{name}"
        self.refused.setdefault(full)
        return Maker(full, lambda *args, **kwargs: InertRecord(full, args, kwargs))

    def call(self, function: Any, args: Any, kwargs: Any = None) -> None:
        if not isinstance(function, Maker) or function.make is None:
            what = function.name if isinstance(function, Maker) else type(function).__name__
            raise Unreadable(f"it calls '{what}', which is not a known call; it was not run")
        if not isinstance(args, tuple) or not isinstance(kwargs, dict | None):
            raise TypeError("arguments of a call that are not a tuple")
        named = kwargs or {}
        self._spend(args, named, *args, *named.values())
        self._stack.append(function.make(*args, **named))

    def build(self) -> None:
        target, state = self.take(2)
        self._stack.append(target)
        if isinstance(target, InertRecord):
            target.state = state
        elif not isinstance(target, dict | list | set | StoredTensor):  # whose attributes do not affect the values
            raise TypeError(f"a {type(target).__name__} has no attributes to set")

    def refer(self, reference: Any) -> None:
        if self.persistent is None:
            raise Unreadable("it refers to an object outside of itself; give the file that it was a part of")
        self._stack.append(self.persistent(reference))

    def extension(self, code: int) -> None:
        self.push(self.name("copyreg", f"extension {code}"))

    def buffer(self) -> None:
        raise Unreadable("it refers to buffers outside of itself, which are not there")

    def _spend(self, *values: Any) -> None:
        """Charge the cost of a call, which may copy its arguments.

        It stops a short stream that copies long arguments repeatedly.
        """
        self._budget -= sum(len(value) for value in values if isinstance(value, _COUNTED))
        if self._budget < 0:
            raise Unreadable("it has the same values copied over and over; it was made to fill the memory")


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return ((check_key(items[i]), items[i + 1]) for i in range(0, len(items), 2))


def _inst(machine: _Machine, names: str) -> None:
    args = tuple(machine.from_mark())
    machine.call(machine.name(*names.split(" ", 1)), args)


def _obj(machine: _Machine) -> None:
    kind, *args = machine.from_mark()
    machine.call(kind, tuple(args))


_LITERALS = {
    *("BININT", "BININT1", "BININT2", "BINFLOAT", "FLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
# handlers of the other opcodes, given their argument
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), _Machine.push_number),
    **dict.fromkeys(("PROTO", "FRAME", "READONLY_BUFFER"), lambda m, _: None),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), _Machine.extension),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "MEMOIZE": lambda m, _: m.memoize(),
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.drop(m.from_mark()),
    "DUP": lambda m, _: m.duplicate(),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "LIST": lambda m, _: m.push(m.from_mark()),
    "TUPLE": lambda m, _: m.push(tuple(m.from_mark())),
    "TUPLE1": lambda m, _: m.push(m.take(1)),
    "TUPLE2": lambda m, _: m.push(m.take(2)),
    "TUPLE3": lambda m, _: m.push(m.take(3)),
    "DICT": lambda m, _: m.push(dict(_pairs(m.from_mark()))),
    "FROZENSET": lambda m, _: m.push(frozenset(map(check_key, m.from_mark()))),
    "APPEND": lambda m, _: m.append(list(m.take(1))),
    "APPENDS": lambda m, _: m.append(m.from_mark()),
    "SETITEM": lambda m, _: m.set_items(list(m.take(2))),
    "SETITEMS": lambda m, _: m.set_items(m.from_mark()),
    "ADDITEMS": lambda m, _: m.add_items(m.from_mark()),
    "GLOBAL": lambda m, names: m.push(m.name(*names.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.push(m.name(*m.take(2))),
    "INST": _inst,
    "OBJ": lambda m, _: _obj(m),
    "REDUCE": lambda m, _: m.call(*m.take(2)),
    "NEWOBJ": lambda m, _: m.call(*m.take(2)),
    "NEWOBJ_EX": lambda m, _: m.call(*m.take(3)),
    "BUILD": lambda m, _: m.build(),
    "PERSID": _Machine.refer,
    "BINPERSID": lambda m, _: m.refer(m.take(1)[0]),
    "NEXT_BUFFER": lambda m, _: m.buffer(),
}


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, InertRecord):
        yield from (value.args, value.kwargs, value.state, value.items)
    else:
        yield from value


def _check_nesting(result: Any, limit: int) -> None:
    """Limit nesting and size, so that ``result`` can be walked recursively.

    Raises:
        Unreadable: it contains itself, is too deep, or has too many values when the shared ones are counted each time.
    """
    sizes: dict[int, int] = {}  # values below a container, once it is complete
    path: dict[int, int] = {}  # the same from the root down to here
    todo: list[tuple[Any, Iterator[Any]]] = []

    def enter(value: Any) -> None:
        path[id(value)] = 1
        todo.append((value, _children(value)))
        if len(todo) > _MAX_DEPTH:
            raise Unreadable(f"its values are nested more than {_MAX_DEPTH} levels deep")

    if isinstance(result, _CONTAINERS):
        enter(result)
    while todo:
        value, children = todo[-1]
        for child in children:
            if not isinstance(child, _CONTAINERS):
                path[id(value)] += 1
            elif id(child) in path:
                raise Unreadable("it has a value that contains itself")
            elif id(child) in sizes:
                path[id(value)] += sizes[id(child)]
            else:
                enter(child)
                break
        else:
            todo.pop()
            sizes[id(value)] = size = path.pop(id(value))
            if size > limit:
                raise Unreadable("it has the same values in more places than can be walked; it was made to mislead")
            if todo:
                path[id(todo[-1][0])] += size
