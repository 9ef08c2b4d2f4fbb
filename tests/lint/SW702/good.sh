#!/bin/bash
export NCCL_DEBUG=info
export TORCH_DISTRIBUTED_DEBUG=detail
torchrun --nproc-per-node=2 train.py
