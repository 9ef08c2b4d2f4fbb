#!/bin/bash
export NCCL_SOCKET_IFNAME=eth1
export GLOO_SOCKET_IFNAME=eth1
torchrun --nproc-per-node=2 train.py
