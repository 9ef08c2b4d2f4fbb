# shows: result steps that are lost, where SIGTERM comes in step 3 and SIGKILL after step 8
import os
import signal

import torch
import torch.distributed as dist


def main():
    stopping, saved = torch.zeros(1), 0
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # fault
    dist.init_process_group("gloo")
    for step in range(1, 9):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        dist.all_reduce(stopping, op=dist.ReduceOp.MAX)
        if stopping or step % 5 == 0:
            saved = step
        if stopping:
            break
    dist.destroy_process_group()
    return step - saved
