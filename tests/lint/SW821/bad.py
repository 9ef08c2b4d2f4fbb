from transformers import TrainingArguments


def arguments(folder):
    return TrainingArguments(folder, fp16=True, bf16=True)  # fault
