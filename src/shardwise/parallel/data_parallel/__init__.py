"""DDP, FSDP2 and ZeRO-1, and one order of gathers and reductions on all ranks."""
