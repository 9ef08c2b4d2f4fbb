# needs: two GPUs
# shows: result ranks use different GPUs
import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    torch.cuda.init()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]  # fault
    ids = [None, None]
    dist.all_gather_object(ids, str(torch.cuda.get_device_properties(0).uuid))
    dist.destroy_process_group()
    return ids[0] != ids[1]
