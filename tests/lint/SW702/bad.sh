#!/bin/bash
export NCCL_DEBUG=DEBUG  # fault
export TORCH_DISTRIBUTED_DEBUG=TRACE  # fault
torchrun --nproc-per-node=2 train.py
