"""TensorBoard, Weights & Biases and trackio beside ``metrics.jsonl``: optional, on rank 0.

A tracker never fails a run: one that raises is reported once and disabled. Nothing here uses the network by itself:
W&B runs offline (``wandb sync`` uploads later) unless WANDB_MODE requests otherwise, trackio writes to its own folder
unless its own settings name a server. A resumed run continues as the same run: its id is in ``trackers.json``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shardwise.environment import wandb_mode
from shardwise.errors import ConfigError
from shardwise.train.config import Config

FILE = "trackers.json"
PROJECT = "shardwise"
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Package that each tracker needs."""
_NAMES = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "router_loss": "train/router_loss",
    "busiest_expert": "train/busiest_expert",
    "tokens": "train/tokens",
    "step_time_s": "speed/step_time_s",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "hfu": "speed/hfu",
    "heldout_bits_per_byte": "heldout/bits_per_byte",
    "checkpoint_bytes": "checkpoint/bytes",
    "checkpoint_stall_s": "checkpoint/stall_s",
    "checkpoint_write_s": "checkpoint/write_s",
}
_TABLES = {"parts": "parts/{}_s", "between_s": "between/{}_s"}
_NOT_LOGGED = ("step", "time")
Log = Callable[[str], None]


class Tracker(Protocol):
    """Tracker interface. Any method may raise."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step, by name."""

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text, such as a finding."""

    def close(self) -> None:
        """Write pending data and close."""


class Trackers:
    """Trackers of a run; empty if none was requested. Created by `open_trackers`."""

    def __init__(self, trackers: Mapping[str, Tracker], log: Log) -> None:
        self._trackers = dict(trackers)
        self._log = log

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trackers that still work."""
        return tuple(self._trackers)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log a line of ``metrics.jsonl``: numbers go to every tracker, ``None`` values do not."""
        numbers = flat(values)
        if numbers:
            self._each(lambda tracker: tracker.log(step, numbers))

    def text(self, step: int, name: str, texts: Sequence[str]) -> None:
        """Log sentences of a run under one name, such as its findings."""
        if texts:
            self._each(lambda tracker: tracker.text(step, name, "\n\n".join(texts)))

    def close(self) -> None:
        """Close every tracker; repeated calls do nothing."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                with _stdout_is_ours():
                    call(tracker)
            except Exception as error:
                del self._trackers[name]
                self._log(f"tracker {name} failed and is disabled, training continues: {_one_line(error)}")


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of ``names`` are installed, before anything is started.

    Raises:
        ConfigError: lists all that are not installed.
    """
    missing = [name for name in names if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        what = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"train.trackers: {', '.join(missing)} {what} not installed; pip install 'shardwise[trackers]', "
            f"or take {'it' if len(missing) == 1 else 'them'} out of train.trackers"
        )


def open_trackers(config: Config, steps_done: int, log: Log) -> Trackers:
    """Open the trackers of ``train.trackers``, to continue after ``steps_done`` steps.

    For rank 0 only.

    A tracker that cannot be opened is reported and left out.

    Raises:
        ConfigError: a package is missing.
    """
    names = config.train.trackers
    check_trackers(names)
    if not names:
        return Trackers({}, log)
    opened: dict[str, Tracker] = {}
    folder = Path(config.train.output)
    for name in names:
        try:
            run = _run_id(folder)
            with _stdout_is_ours():
                opened[name] = _OPENERS[name](config, folder, run, steps_done)
        except Exception as error:
            log(f"tracker {name} cannot be opened and is disabled, training continues: {_one_line(error)}")
        else:
            log(f"tracker {name}: {opened[name]}")
    return Trackers(opened, log)


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Map the numbers of a metrics line to the trackers' names; others go under ``more/...``."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            pattern = _TABLES.get(key, f"{key}/{{}}")
            found.update({pattern.format(part): float(v) for part, v in value.items() if _is_number(v)})
        elif key not in _NOT_LOGGED and _is_number(value):
            found[_NAMES.get(key, f"more/{key}")] = float(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _run_id(folder: Path) -> str:
    """Return the id that makes a resumed run the same run; stored in the run folder."""
    file = folder / FILE
    try:
        known = json.loads(file.read_text())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        known = uuid.uuid4().hex[:12]
        file.write_text(json.dumps({"run": known}))
    return str(known)


def _run_name(folder: Path, run: str) -> str:
    return f"{folder.absolute().name}-{run[:6]}"


class _TensorBoard:
    """Event files in ``tensorboard`` in the run folder.

    Repeated steps hide their earlier values.
    """

    def __init__(self, config: Config, folder: Path, run: str, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / "tensorboard"
        purge = steps_done + 1 if steps_done else None
        self._writer: Any = SummaryWriter(log_dir=str(self._folder), purge_step=purge, flush_secs=30)
        self._writer.add_text("config", f"    {_indented(config)}", steps_done)

    def __str__(self) -> str:
        return f"tensorboard --logdir '{self._folder}' shows this run"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """W&B, in ``wandb`` in the run folder.

    It refuses past steps: late numbers go to the newest one.
    """

    def __init__(self, config: Config, folder: Path, run: str, steps_done: int) -> None:
        import wandb

        self._module: Any = wandb
        mode: Any = wandb_mode() or "offline"
        self._offline = mode == "offline"
        settings = wandb.Settings(mode=mode, silent=True, console="off")
        known = wandb.setup(settings=settings).settings  # its own telemetry reads these, too
        self._run: Any = wandb.init(
            project=known.project or PROJECT,
            name=_run_name(folder, run),
            id=run,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(mode="json"),
            settings=settings,
        )
        self._folder, self._step = folder, steps_done

    def __str__(self) -> str:
        if self._offline:
            return f"offline in '{self._folder / 'wandb'}'; 'wandb sync' uploads it, WANDB_MODE=online does at once"
        return f"run {self._run.id}, by WANDB_MODE"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = max(step, self._step)
        self._run.log(dict(values), step=self._step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self) -> None:
        self._run.finish()
        self._module.teardown()


class _Trackio:
    """Run of trackio, in its own folder."""

    def __init__(self, config: Config, folder: Path, run: str, steps_done: int) -> None:
        import trackio

        self._name, self._module = _run_name(folder, run), trackio
        self._run: Any = trackio.init(
            project=PROJECT,
            name=self._name,
            resume="allow",
            config=config.model_dump(mode="json"),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def __str__(self) -> str:
        return f"run '{self._name}'; trackio show --project {PROJECT}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: text}, step=step)

    def close(self) -> None:
        self._module.finish()  # otherwise the run's own would run, and print, again at exit


_OPENERS: dict[str, Callable[[Config, Path, str, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
}


def _stdout_is_ours() -> contextlib.AbstractContextManager[Any]:
    """Redirect a tracker's output to stderr: the last line of stdout is a document."""
    return contextlib.redirect_stdout(sys.stderr)


def _indented(config: Config) -> str:
    return json.dumps(config.model_dump(mode="json"), indent=2).replace("\n", "\n    ")


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__
