# shows: error At most one of fp16 and bf16 can be True, but not both
import tempfile

from transformers import TrainingArguments


def main():
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, fp16=True, bf16=True)  # fault
    return args.bf16
