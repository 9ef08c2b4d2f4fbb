"""Static rules over training scripts, launch files and configs: what goes wrong on many ranks, before it starts."""
