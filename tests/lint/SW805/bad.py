import deepspeed


def build(model, optimizer):
    return deepspeed.initialize(model=model, optimizer=optimizer, config="with_auto.json")  # fault
