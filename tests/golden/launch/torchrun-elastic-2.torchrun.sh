#!/bin/sh
# Made by shardwise launch for 16 ranks.
# One line for each node; gpu-0:29400 must be the first, and all must reach it. Start them
# within 15 minutes (join_timeout). Each node needs this Python, and the same files at the same paths.
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE: Workers of a restart would find the store's keys of the attempt before, and gloo would hang on them.
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT: torchrun kills ranks that are still saving 100 s after a signal; its default is 30 s.
# OMP_NUM_THREADS: The cores of a node, divided by its ranks; torchrun's default is one thread for each rank.
# PYTORCH_ALLOC_CONF: The plan's memory assumes it: without it PyTorch reserves up to a tenth more.
# NCCL and gloo each choose a network interface. If they choose wrong: shardwise launch --interface NAME.
case "$1" in
0) # node 0
    cd /home/ada && exec env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100 OMP_NUM_THREADS=8 PYTORCH_ALLOC_CONF=expandable_segments:True /home/ada/.venv/bin/python -m torch.distributed.run --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=gpu-0:29400 --rdzv-id=lm --rdzv-conf=is_host=true,join_timeout=900,read_timeout=900 --nproc-per-node=8 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --max-restarts=10 -m shardwise train /home/ada/config.toml train.steps=1000 parallel.strategy=fsdp ;;
1) # node 1
    cd /home/ada && exec env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100 OMP_NUM_THREADS=8 PYTORCH_ALLOC_CONF=expandable_segments:True /home/ada/.venv/bin/python -m torch.distributed.run --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=gpu-0:29400 --rdzv-id=lm --rdzv-conf=is_host=false,join_timeout=900,read_timeout=900 --nproc-per-node=8 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --max-restarts=10 -m shardwise train /home/ada/config.toml train.steps=1000 parallel.strategy=fsdp ;;
*) echo "give the number of the node, 0 to 1" >&2; exit 2 ;;
esac
