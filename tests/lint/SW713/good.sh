#!/bin/bash
#SBATCH --cpus-per-task=64
export OMP_NUM_THREADS=8
torchrun --standalone --nproc-per-node=8 train.py
