#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
srun hostname
srun --cpus-per-task=48 torchrun --nnodes=2 --nproc-per-node=8 --rdzv-endpoint="$HEAD:29500" --rdzv-backend=c10d train.py
