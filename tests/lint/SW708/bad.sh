#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
srun hostname
srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-endpoint="$HEAD:$PORT" --rdzv-backend=c10d train.py  # fault
