"""A rank of the doctor's self-test that is sabotaged as ``SABOTAGE`` says: ``RANK:STAGE:HOW``."""

from __future__ import annotations

import os
import signal
import time

from shardwise.doctor import rank_self_test as ranks_test
from shardwise.doctor import start_ranks as doctor_ranks


def main(task, ranks) -> None:
    """Behave until the stage, then do what was asked for."""
    ranks, stage, how = os.environ["SABOTAGE"].split(":")
    if os.environ["RANK"] not in ranks.split(","):
        return doctor_ranks.answer_as_rank(task, ranks)

    def sabotage(entered: str) -> None:
        if entered != stage:
            return
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raise":
            raise ImportError("no such library")
        elif how == "late":
            time.sleep(600)
        elif how == "wrong":
            import torch.distributed as dist

            real = dist.all_reduce

            def flipped(tensor):
                real(tensor)
                tensor[7] += 1

            dist.all_reduce = flipped

    if stage == "import":
        sabotage("import")
    real = ranks_test.self_test
    ranks_test.self_test = lambda *arguments, **options: real(*arguments, **options, on_stage=sabotage)
    return doctor_ranks.answer_as_rank(task, ranks)
