#!/bin/bash
export NCCL_DEBUG=info
export TORCH_DISTRIBUTED_DEBUG=DETAIL
torchrun --nproc-per-node=8 train.py
