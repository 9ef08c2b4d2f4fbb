import tempfile

from transformers import TrainingArguments


def main():
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, bf16=True)
    return args.bf16
