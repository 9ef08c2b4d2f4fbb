"""One file that trains a GPT with DDP, or alone: switches at the top, random windows of one long array of tokens."""

import os
import time
from contextlib import nullcontext

import numpy as np
import torch
from model import GPT, GPTConfig
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

eval_interval, eval_iters, max_iters = 2000, 200, 600000
gradient_accumulation_steps, batch_size, block_size = 40, 12, 1024
learning_rate, grad_clip = 6e-4, 1.0
backend, dtype, compile = "nccl", "float16", True
out_dir = "out"

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    device = "cuda"
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
context = torch.amp.autocast(device_type="cuda", dtype=getattr(torch, dtype)) if dtype else nullcontext()


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


iter_num, best_val_loss = 0, 1e9
model = GPT(GPTConfig(block_size=block_size))
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        x, y = get_batch("val")
        with context:
            _, loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


x, y = get_batch("train")
raw_model = model.module if ddp else model
started = time.time()
while iter_num <= max_iters:
    if iter_num % eval_interval == 0 and master_process:
        loss = estimate_loss()
        print(f"step {iter_num}: {loss:.4f}")
        if loss < best_val_loss:
            best_val_loss = loss
            torch.save({"model": raw_model.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with context:
            _, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)  # SW602: the gradients are still scaled
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if master_process and time.time() - started > 86400:
        print("out of time")
        break  # SW309: the other ranks go on
    iter_num += 1
if ddp:
    destroy_process_group()
