#!/bin/bash
export NCCL_DEBUG=DEBUG  # fault
export TORCH_DISTRIBUTED_DEBUG=detail
torchrun --nproc-per-node=8 train.py
