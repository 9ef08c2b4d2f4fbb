#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:1
torchrun --standalone --nproc-per-node 2 train.py  # fault
