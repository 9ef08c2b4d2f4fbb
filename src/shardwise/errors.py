"""Exceptions that Shardwise raises on purpose.

::

    ShardwiseError
    ├── UserError            a mistake to fix in a config, a command or a script        exit 2
    │   ├── ConfigError      the config file or an override
    │   ├── PlanError        an invalid strategy, degree or batch
    │   ├── ModelError       a model that cannot be trained as asked
    │   └── DataError        a corpus that is missing, empty or unreadable
    ├── AnswerIsNo           a valid request with a negative answer                     exit 1
    │   ├── DoesNotFit       no plan fits the devices
    │   ├── ReceiptError     the run differs from the plan
    │   └── TrainingError    the loss is not a number
    ├── MachineError         a rank, a link, a disk or a port failed                    exit 3
    │   ├── CheckpointError  a checkpoint is damaged or cannot be written
    │   │   └── CheckpointMismatch  a checkpoint of another model or optimizer       exit 2
    │   ├── OutOfMemory      a device or the host had no memory left
    │   │   └── KilledForMemory     the kernel killed a rank
    │   └── RankError        a rank died, hung or raised
    └── Interrupted          the user stopped it                                        exit 130
        └── Preempted        a scheduler stopped it: start it again                     exit 75
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ShardwiseError(Exception):
    """Base class; ``exit_code`` is the exit status of the command line.

    ``on_all_ranks`` says that each rank raises it, so that rank 0 alone prints it.
    """

    exit_code = 3
    on_all_ranks = False


class UserError(ShardwiseError):
    """User error: names the value, the rule and the fix; may carry several problems at once."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems: Sequence[str] = problems
        super().__init__("\n".join(problems))


class ConfigError(UserError):
    """The config file, or a ``key=value`` override, is wrong."""


class PlanError(UserError):
    """The strategy, the degrees or the batch are invalid."""


class ModelError(UserError):
    """The model cannot be built or trained as asked."""


class DataError(UserError):
    """The corpus is missing, empty or unreadable."""


class AnswerIsNo(ShardwiseError):
    """A valid request with a negative answer."""

    exit_code = 1


class DoesNotFit(AnswerIsNo):
    """No plan fits the devices."""


class ReceiptError(AnswerIsNo):
    """A run's effects differ from its plan."""


class TrainingError(AnswerIsNo):
    """Training cannot continue: the loss or the gradient is not finite."""


class MachineError(ShardwiseError):
    """A rank, a link, a disk or a port failed."""


class CheckpointError(MachineError):
    """A checkpoint is damaged, or could not be written."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not match the run that resumes from it: a user error."""

    exit_code = 2


class OutOfMemory(MachineError):
    """A device or the host had no memory left; the message has the nearest plan that fits."""


class KilledForMemory(OutOfMemory):
    """The kernel killed a rank, as the host had no memory left."""


class RankError(MachineError):
    """A rank died, hung or raised; the message puts the first failure first."""


class Interrupted(ShardwiseError):
    """A stop was requested (Ctrl-C)."""

    exit_code = 130
    on_all_ranks = True


class Preempted(Interrupted):
    """A scheduler took the machine away (SIGTERM or SIGUSR1); the same command resumes."""

    exit_code = 75  # EX_TEMPFAIL of <sysexits.h>: a failure that passes, try again


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known word, or an empty string."""
    close = difflib.get_close_matches(word, [name for name in known if name != word], n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
