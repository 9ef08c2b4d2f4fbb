import os
import signal

import torch
import torch.distributed as dist


def main():
    stopping, saved = torch.zeros(1), 0
    signal.signal(signal.SIGTERM, lambda *_: stopping.fill_(1))
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
