#!/bin/bash
#SBATCH --cpus-per-task=64
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 2))
torchrun --standalone --nproc-per-node=2 train.py
