#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:4
torchrun --standalone --nproc-per-node 8 train.py  # fault
