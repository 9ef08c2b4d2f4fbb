#!/bin/bash
cd "$(dirname "$0")"
torchrun --nproc-per-node=2 example.py --epochs 3
RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 python example.py
