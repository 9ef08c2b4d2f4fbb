#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:1
torchrun --standalone --nproc-per-node 1 train.py
