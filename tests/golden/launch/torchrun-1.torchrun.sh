#!/bin/sh
# Made by shardwise launch for 8 ranks.
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE: a restart would find the store's keys of the attempt before, and hang.
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT: seconds that ranks may save after a signal; torchrun's default is 30.
# NCCL and gloo each choose a network interface. If they choose wrong: --interface NAME.
cd /home/ada && exec env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100 OMP_NUM_THREADS=8 /home/ada/.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node=8 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --max-restarts=0 -m shardwise train /home/ada/config.toml train.steps=1000 parallel.strategy=fsdp
