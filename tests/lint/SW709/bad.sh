#!/bin/bash
torchrun --nnodes=2 --nproc-per-node=8 train.py  # fault
torchrun --standalone --nnodes 4 --nproc-per-node 8 train.py  # fault
