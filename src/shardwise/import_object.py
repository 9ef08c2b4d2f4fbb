"""Import a user's ``package.module:name``, report errors of the user's code in one line, quiet what imports print."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.errors import ConfigError, UserError, did_you_mean


def load_object(path: str, key: str) -> Callable[..., Any]:
    """Import ``package.module:name`` or ``folder/file.py:name``.

    Raises:
        ConfigError: the form is wrong, the module is missing or broken, or has no such function.
    """
    place, _, name = path.rpartition(":")
    named = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    if not (named and name.isidentifier()):
        raise ConfigError(
            f"{key} '{path}' is neither package.module:function nor file.py:function, such as models.tiny:build"
        )
    module = load_module(place, f"{key} '{path}'")
    if not hasattr(module, name):
        raise ConfigError(f"{key} '{path}': module '{place}' has no '{name}'{did_you_mean(name, dir(module))}")
    found: Callable[..., Any] = getattr(module, name)
    if not callable(found):
        raise ConfigError(f"{key} '{path}' is {found!r:.40}; name a function or a class")
    return found


def load_module(place: str, label: str, refuse: type[UserError] = ConfigError) -> ModuleType:
    """Import ``package.module``, or run ``folder/file.py`` as a module; ``label`` is for messages.

    Raises:
        UserError: of the class ``refuse``: it is missing or broken.
    """
    if place.endswith(".py"):
        return _file_module(Path(place), label, refuse)
    _search(Path.cwd())  # the installed command does not search the working directory
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise refuse(
            f"{label}: no module named '{error.name}'; install it or run from the folder that contains it"
        ) from None
    except Exception as error:
        raise refuse(f"{label}: importing it raised {raised_text(error)}; repair the module") from error


def _file_module(file: Path, label: str, refuse: type[UserError]) -> ModuleType:
    if not file.is_file():
        raise refuse(f"{label}: there is no file '{file}'")
    name = f"_shardwise_model_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise refuse(f"{label}: '{file}' cannot be imported; give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and the like look up their module
    _search(file.resolve().parent)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise refuse(f"{label}: running '{file}' raised {raised_text(error)}; repair the file") from error
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def optional_object(path: str) -> Callable[..., Any] | None:
    """Import ``package.module:name`` like `load_object`; ``None`` where there is no such module."""
    _search(Path.cwd())
    try:
        found = importlib.util.find_spec(path.partition(":")[0])
    except ModuleNotFoundError:  # of a package above it
        return None
    return None if found is None else load_object(path, "peer")


def import_path(path: str) -> Any:
    """What the package's own tables name as ``package.module:name``; a user's folder is not looked at."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def check_kwargs(function: Callable[..., Any], where: str, *args: Any, **kwargs: Any) -> None:
    """Check that the user's function takes these arguments, before the call.

    Raises:
        ConfigError: an argument is missing or unknown; names the nearest and all arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a class in C may have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        known = list(signature.parameters)
        hint = next((hint for word in kwargs if word not in known and (hint := did_you_mean(word, known))), "")
        takes = f"takes {', '.join(known)}" if known else "takes no arguments"
        raise ConfigError(f"{where}: {error}{hint}; it {takes}") from None


def raised_text(error: Exception) -> str:
    """Format an exception of the user's code on one line, with its location."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    others = (str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<")
    theirs = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f"{text} ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else text


def silence_bitsandbytes() -> None:
    """Suppress bitsandbytes' warning at import, in each rank, about its CPU kernels."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
