from transformers import TrainingArguments


def arguments(folder):
    return TrainingArguments(folder, bf16=True)
