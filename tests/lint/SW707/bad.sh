#!/bin/bash
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2 --master-port=29500 train.py --seed 0 &
CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node=2 --master-port=29500 train.py --seed 1 &  # fault
wait
