"""LoRA and QLoRA on a live model: adapters by peft, and the quantized base by bitsandbytes."""
