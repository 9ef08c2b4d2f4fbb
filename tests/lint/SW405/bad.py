# shows: result names in the file
import io

import torch
from torch import nn


def main():
    model = nn.Linear(4, 1)
    model = torch.compile(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)  # fault
    return list(torch.load(io.BytesIO(file.getvalue())))
