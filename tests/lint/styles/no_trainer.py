"""A loop of one's own with accelerate, as its examples write it."""

import argparse
import math

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, default_data_collator, get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="a-model")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", default="out")
    return parser.parse_args()


def main():
    args = parse_args()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, fsdp_plugin=plugin)
    set_seed(0)
    rows = load_dataset("json", data_files={"train": "train.jsonl", "valid": "valid.jsonl"})
    train_loader = DataLoader(rows["train"], shuffle=True, collate_fn=default_data_collator, batch_size=8)
    eval_loader = DataLoader(rows["valid"], collate_fn=default_data_collator, batch_size=8)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    steps = math.ceil(len(train_loader) / args.gradient_accumulation_steps) * args.epochs
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    model, optimizer, train_loader, eval_loader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, lr_scheduler
    )
    progress = tqdm(range(steps), disable=not accelerator.is_local_main_process)
    for epoch in range(args.epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                loss = loss / args.gradient_accumulation_steps  # SW213: accelerator.backward() divides as well
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    progress.update(1)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(8)))
        accelerator.print(f"epoch {epoch}: {torch.cat(losses).mean():.4f}")
        if accelerator.is_main_process:
            accelerator.save_state(f"{args.output}/epoch-{epoch}")  # SW403: all processes have to call it
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(args.output, is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
