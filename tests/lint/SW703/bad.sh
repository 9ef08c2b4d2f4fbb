#!/bin/bash
export NCCL_SOCKET_IFACE=eth0  # fault
NCCL_TIMEOUT=3600 torchrun --nproc-per-node=8 train.py  # fault
