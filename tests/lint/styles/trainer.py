"""Fine-tuning with the Trainer of transformers: it splits data, reduces gradients and saves on one rank by itself."""

import os
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

os.environ.setdefault("NCCL_BLOCKING_WAIT", "1")  # SW701: the variable has another name since PyTorch 2.2


@dataclass
class ScriptArguments:
    model: str = field(default="a-model")
    data: str = field(default="train.jsonl")
    length: int = field(default=1024)


def main():
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model, dtype=torch.bfloat16)
    with arguments.main_process_first(desc="tokenizing"):
        rows = load_dataset("json", data_files=script.data, split="train")
        rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=script.length), batched=True)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()
