"""Plain stacks: what most people train."""

from __future__ import annotations

import torch
from torch import nn

from tests.world.zoo.case import VOCAB, WIDTH, Net, cross_entropy, floats, tokens, zoo


def mlp(width: int = WIDTH, inner: int = 16) -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))


def chain(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Residual blocks one after the other."""
    for block in model.blocks:
        x = x + block(x)
    return model.head(x) if hasattr(model, "head") else x


def stack(depth: int = 3, **parts: nn.Module) -> Net:
    """Residual blocks, and a head."""
    return Net(chain, blocks=[mlp() for _ in range(depth)], **{"head": nn.Linear(WIDTH, WIDTH), **parts})


def text(body: nn.Module, take: int | None = None) -> Net:
    """Token ids through ``body`` to logits; ``take`` is which of its outputs."""

    def run(model: Net, ids: torch.Tensor) -> torch.Tensor:
        found = model.body(model.embed(ids))
        return model.head(found if take is None else found[take])

    return Net(run, embed=nn.Embedding(VOCAB, WIDTH), body=body, head=nn.Linear(WIDTH, VOCAB))


zoo("one linear layer", lambda: nn.Linear(WIDTH, WIDTH))
zoo("one linear layer without bias", lambda: nn.Linear(WIDTH, WIDTH, bias=False))
zoo("plain linear stack", lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
zoo("linear stack in Sequential", lambda: nn.Sequential(*(mlp() for _ in range(3))))
zoo("residual stack", stack)
zoo("deep stack of 12", lambda: stack(12))
zoo("no blocks", lambda: Net(lambda m, x: m.down(torch.tanh(m.up(x))), up=nn.Linear(8, 16), down=nn.Linear(16, 8)))
zoo("wide first layer", lambda: nn.Sequential(nn.Linear(WIDTH, 257), nn.ReLU(), nn.Linear(257, WIDTH)))
zoo("prime widths", lambda: nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 11), nn.Linear(11, 5)),
    floats(7, out=(5,)))  # fmt: skip
zoo("layer norms", lambda: stack(norm=nn.LayerNorm(WIDTH)))
for _name, _norm in (
    ("layer", lambda: nn.LayerNorm(WIDTH)),
    ("RMS", lambda: nn.RMSNorm(WIDTH)),
    ("layer without bias", lambda: nn.LayerNorm(WIDTH, bias=False)),
    ("layer without weights", lambda: nn.LayerNorm(WIDTH, elementwise_affine=False)),
):
    zoo(f"{_name} norm in blocks",
        lambda norm=_norm: Net(chain, blocks=[nn.Sequential(norm(), mlp()) for _ in range(2)]))  # fmt: skip
for _name, _act in (("GELU", nn.GELU), ("PReLU", nn.PReLU), ("in-place ReLU", lambda: nn.ReLU(inplace=True))):
    zoo(f"stack with {_name}", lambda act=_act: nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), act(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))))  # fmt: skip

for _name, _rnn in (("RNN", nn.RNN), ("LSTM", nn.LSTM), ("GRU", nn.GRU)):
    zoo(f"{_name} of two layers", lambda rnn=_rnn: text(rnn(WIDTH, WIDTH, 2, batch_first=True), 0), tokens(),
        cross_entropy)  # fmt: skip
zoo("LSTM in both directions", lambda: text(nn.LSTM(WIDTH, 4, bidirectional=True, batch_first=True), 0), tokens(),
    cross_entropy)  # fmt: skip
zoo("LSTM with projection", lambda: text(nn.LSTM(WIDTH, 12, proj_size=8, batch_first=True), 0), tokens(), cross_entropy)


def by_cell(model: Net, ids: torch.Tensor) -> torch.Tensor:
    """A loop over time."""
    state, found = torch.zeros(ids.shape[0], WIDTH, dtype=torch.float64), []
    for x in model.embed(ids).unbind(1):
        state = model.cell(x, state)
        found.append(state)
    return model.head(torch.stack(found, 1))


zoo("GRU cell in a loop", lambda: Net(by_cell, embed=nn.Embedding(VOCAB, WIDTH), cell=nn.GRUCell(WIDTH, WIDTH),
    head=nn.Linear(WIDTH, VOCAB)), tokens(), cross_entropy)  # fmt: skip


def encoder(first: bool = False, depth: int = 2) -> nn.Module:
    """PyTorch's own encoder."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def decoder_run(model: Net, ids: torch.Tensor) -> torch.Tensor:
    """Decoder layers over the embedded ids as memory."""
    x = model.embed(ids)
    mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
    return model.head(model.body(x, x, tgt_mask=mask))


def attention_run(model: Net, ids: torch.Tensor) -> torch.Tensor:
    """nn.MultiheadAttention in residual blocks."""
    x = model.embed(ids)
    for block in model.blocks:
        x = x + block(x, x, x, need_weights=False)[0]
    return model.head(x)


def ends() -> dict[str, nn.Module]:
    """Embedding and head."""
    return {"embed": nn.Embedding(VOCAB, WIDTH), "head": nn.Linear(WIDTH, VOCAB)}


zoo("transformer encoder", lambda: text(encoder()), tokens(), cross_entropy)
zoo("transformer encoder, norm first", lambda: text(encoder(True)), tokens(), cross_entropy)
zoo("transformer decoder", lambda: Net(decoder_run, **ends(), body=nn.TransformerDecoder(
    nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), 2)), tokens(), cross_entropy)  # fmt: skip
zoo("nn.Transformer", lambda: Net(lambda m, ids: m.head(m.body(m.embed(ids), m.embed(ids))), **ends(),
    body=nn.Transformer(WIDTH, 2, 1, 1, 16, 0.0, batch_first=True)), tokens(), cross_entropy)  # fmt: skip
zoo("nn.MultiheadAttention blocks", lambda: Net(attention_run, **ends(), blocks=[
    nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2)]), tokens(), cross_entropy)  # fmt: skip
zoo("attention with other key sizes", lambda: Net(lambda m, x: m.attend(x, x[..., :4], x[..., 4:])[0],
    attend=nn.MultiheadAttention(8, 2, kdim=4, vdim=4, batch_first=True)), floats(3, 8, out=(3, 8)))  # fmt: skip
