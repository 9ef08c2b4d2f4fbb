"""Every exception that Shardwise raises on purpose.

::

    ShardwiseError
    ├── UserError            a mistake to fix in a config, a command or a script      exit 2
    │   ├── ConfigError      the config file or an override
    │   ├── PlanError        a strategy, degrees or a batch that cannot be
    │   ├── ModelError       a model that cannot be trained as asked
    │   └── DataError        a corpus that is missing, empty or unreadable
    ├── AnswerIsNo           the question was understood and the answer is no           exit 1
    │   ├── DoesNotFit       no plan fits the devices
    │   ├── ReceiptError     what took effect is not what was planned
    │   └── TrainingError    the loss is not a number
    ├── MachineError         a rank, a link, a disk or a port failed                    exit 3
    │   ├── CheckpointError  a checkpoint is damaged or cannot be written
    │   │   └── CheckpointMismatch  a checkpoint of another model or optimizer       exit 2
    │   └── RankError        a rank died, hung or raised
    └── Interrupted          somebody asked for the stop                                exit 130
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ShardwiseError(Exception):
    """The root. ``exit_code`` is what the command line ends with."""

    exit_code = 3


class UserError(ShardwiseError):
    """A user's mistake: names the value, the rule and the fix; may carry several problems at once."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems: Sequence[str] = problems
        super().__init__("\n".join(problems))


class ConfigError(UserError):
    """The config file, or a ``key=value`` override, is wrong."""


class PlanError(UserError):
    """The strategy, the degrees or the batch cannot be."""


class ModelError(UserError):
    """The model cannot be built or trained as asked."""


class DataError(UserError):
    """The corpus is missing, empty or unreadable."""


class AnswerIsNo(ShardwiseError):
    """The question was understood, and the answer is no."""

    exit_code = 1


class DoesNotFit(AnswerIsNo):
    """No plan fits the devices."""


class ReceiptError(AnswerIsNo):
    """What took effect differs from what was planned."""


class TrainingError(AnswerIsNo):
    """Training cannot go on: the loss or the gradient is not a number."""


class MachineError(ShardwiseError):
    """A rank, a link, a disk or a port failed."""


class CheckpointError(MachineError):
    """A checkpoint is damaged, or could not be written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint and the run that is to go on from it do not go together: a user's mistake."""

    exit_code = 2


class RankError(MachineError):
    """A rank died, hung or raised; the message puts the first failure first."""


class Interrupted(ShardwiseError):
    """Somebody asked for the stop (Ctrl-C or SIGTERM)."""

    exit_code = 130


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
