import os

import torch


def setup(local_rank):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    print(torch.cuda.get_device_name())
