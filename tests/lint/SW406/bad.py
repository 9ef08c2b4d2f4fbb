import torch


def resume(model, path):
    state = torch.load(path, map_location="cpu", weights_only=False)  # fault
    model.load_state_dict(state["model"])
