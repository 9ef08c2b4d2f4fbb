"""Teach a small torch.nn.Transformer to reverse a sequence."""

import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCAB, LENGTH, WIDTH = 20, 12, 64
SAMPLES, BATCH, ACCUM, EPOCHS = 1024, 16, 2, 6


class Reverser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.transformer = nn.Transformer(
            WIDTH, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, dropout=0, batch_first=True
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        begin = torch.zeros_like(target[:, :1])
        shifted = torch.cat([begin, target[:, :-1]], dim=1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=source.device)
        mixed = self.transformer(self.embed(source) + self.place, self.embed(shifted) + self.place, tgt_mask=mask)
        return self.head(mixed)


def windows(loader: DataLoader, size: int):
    """The batches of one optimizer step, again and again."""
    batches = iter(loader)
    while window := list(itertools.islice(batches, size)):
        yield window


def main() -> None:
    torch.manual_seed(0)
    numbers = torch.randint(1, VOCAB, (SAMPLES, LENGTH))
    loader = DataLoader(TensorDataset(numbers, numbers.flip(1)), batch_size=BATCH, shuffle=True)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of = nn.CrossEntropyLoss(reduction="sum")
    for epoch in range(EPOCHS):
        for window in windows(loader, ACCUM):
            tokens = sum(target.numel() for _, target in window)
            for source, target in window:
                loss = loss_of(model(source, target).flatten(0, 1), target.flatten())
                (loss / tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item() / target.numel():.4f}")


if __name__ == "__main__":
    main()
