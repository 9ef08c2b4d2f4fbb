import io
import os
import pickle

import torch


class Payload:
    def __reduce__(self):
        return exec, ("import os; os.environ['PAYLOAD'] = 'ran'",)


def main():
    file = io.BytesIO()
    torch.save({"model": Payload()}, file)
    file.seek(0)
    try:
        torch.load(file, map_location="cpu")
    except pickle.UnpicklingError as error:
        print(error)
    return os.environ.get("PAYLOAD")
