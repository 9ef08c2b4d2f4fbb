#!/bin/bash
#SBATCH -N 2
export MASTER_ADDR=localhost  # fault
export MASTER_PORT=29500
srun python train.py
