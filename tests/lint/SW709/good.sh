#!/bin/bash
torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 train.py
torchrun --nnodes=2 --node_rank=$1 --master_addr node0 --master_port 29501 --nproc_per_node 8 train.py
torchrun --standalone --nproc-per-node=8 train.py
