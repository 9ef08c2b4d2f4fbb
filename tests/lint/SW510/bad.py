import os

import torch


def setup(local_rank):
    print(torch.cuda.get_device_name())
    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)  # fault
