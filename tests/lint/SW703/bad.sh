#!/bin/bash
export NCCL_SOCKET_IFACE=eth1  # fault
export GLOO_SOCKET_IFACE=eth1  # fault
NCCL_TIMEOUT=3600 torchrun --nproc-per-node=2 train.py  # fault
