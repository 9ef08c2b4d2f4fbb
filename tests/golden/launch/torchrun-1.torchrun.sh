#!/bin/sh
# Made by shardwise launch for 8 ranks.
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE: Workers of a restart would find the store's keys of the attempt before, and gloo would hang on them.
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT: torchrun kills ranks that are still saving 100 s after a signal; its default is 30 s.
# OMP_NUM_THREADS: The cores of a node, divided by its ranks; torchrun's default is one thread for each rank.
# PYTORCH_ALLOC_CONF: The plan's memory assumes it: without it PyTorch reserves up to a tenth more.
# NCCL and gloo each choose a network interface. If they choose wrong: shardwise launch --interface NAME.
cd /home/ada && exec env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100 OMP_NUM_THREADS=8 PYTORCH_ALLOC_CONF=expandable_segments:True /home/ada/.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node=8 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --max-restarts=0 -m shardwise train /home/ada/config.toml train.steps=1000 parallel.strategy=fsdp
