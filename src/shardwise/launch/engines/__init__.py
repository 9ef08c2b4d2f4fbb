"""Engines that start a run on several machines: torchrun, Slurm, Kubernetes, SkyPilot."""
