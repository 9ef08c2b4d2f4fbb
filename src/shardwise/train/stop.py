"""End of a run that was stopped: by the user, or by a scheduler."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime
from pathlib import Path

from shardwise.checkpoint.storage.local_storage import Folder
from shardwise.distributed.process_group import gather_ints
from shardwise.errors import Interrupted, Preempted
from shardwise.train.run_files import RunFile, replace_file
from shardwise.train.session_interface import TrainingSession


def stop_error(session: TrainingSession, output: Path, saved: Folder, total: int) -> Interrupted:
    """Return what a stopped run raises once it has saved. Collective.

    A preempted run leaves a file in ``output``: launchers hide the exit codes of their ranks.
    """
    step = session.steps_done
    text = f"after step {step} of {total}, saved as '{saved}'; the same command resumes from there"
    if session.stopped_by == signal.SIGINT:
        return Interrupted(f"stopped {text}")
    name = signal.Signals(session.stopped_by).name
    if session.ranks.is_main:
        facts = {"step": step, "signal": name, "when": datetime.now(UTC).isoformat(timespec="seconds")}
        replace_file(output / RunFile.PREEMPTED, json.dumps(facts) + "\n")
    gather_ints([], session.ranks, "the end of the run")  # no rank ends before the file is there
    return Preempted(f"preempted by {name} {text}")
