"""Convolutions, images, and what has running statistics."""

# ruff: noqa: E501 rows of a table

from __future__ import annotations

import torch
from torch import nn

from tests.world.zoo.case import WIDTH, Net, changed, floats, zoo
from tests.world.zoo.stacks import chain, encoder, mlp

IMAGES = floats(3, 8, 8, out=(4,))


def conv(here: int, there: int, norm: nn.Module | None = None, **options: int) -> nn.Module:
    """A 3x3 convolution."""
    return nn.Sequential(nn.Conv2d(here, there, 3, padding=1, **options), norm or nn.Identity(), nn.ReLU())


def classifier(*body: nn.Module, width: int = WIDTH) -> nn.Module:
    """Body, mean over the image, and a linear layer."""
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def res_block(norm: nn.Module | None = None) -> Net:
    """Two convolutions around a skip."""
    return Net(lambda m, x: torch.relu(x + m.body(x)), body=nn.Sequential(conv(8, 8, norm), nn.Conv2d(8, 8, 3, 1, 1)))


def unet_run(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Down and up again, with a skip."""
    x = model.first(x)
    low = model.down(x)
    return model.last(torch.cat([x, model.up(model.middle(low))], 1))


def unet() -> Net:
    """A small U."""
    return Net(unet_run, first=conv(3, 4), down=conv(4, 8, stride=2), middle=conv(8, 8),
        up=nn.ConvTranspose2d(8, 4, 2, 2), last=nn.Conv2d(8, 3, 1))  # fmt: skip


def vit_run(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Patches, a class token and places."""
    x = model.patch(x).flatten(2).mT
    x = torch.cat([model.cls.expand(len(x), -1, -1), x], 1) + model.place
    return model.head(model.body(x)[:, 0])


def vit() -> Net:
    """A small vision transformer."""
    return Net(vit_run, patch=nn.Conv2d(3, WIDTH, 4, 4), cls=nn.Parameter(torch.zeros(1, 1, WIDTH)),
        place=nn.Parameter(torch.randn(1, 5, WIDTH)), body=encoder(), head=nn.Linear(WIDTH, 4))  # fmt: skip


zoo("conv 2d", lambda: classifier(conv(3, 8), conv(8, 8)), IMAGES)
zoo("conv 1d", lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.Flatten(),
    nn.Linear(32, 4)), floats(3, 8, out=(4,)))  # fmt: skip
zoo("conv 3d", lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.Flatten(), nn.Linear(32, 4)), floats(1, 4, 4, 4, out=(4,)))
zoo("grouped and dilated convolutions",
    lambda: classifier(conv(3, 8), conv(8, 8, groups=4), conv(8, 8, dilation=2)), IMAGES)  # fmt: skip
zoo("depthwise separable convolutions", lambda: classifier(conv(3, 8), *(
    nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(8, 8, 1)) for _ in range(2))), IMAGES)  # fmt: skip
zoo("transposed convolution", lambda: nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.ConvTranspose2d(4, 3, 2, 2)),
    floats(3, 4, 4, out=(3, 4, 4)))  # fmt: skip
zoo("bilinear layer", lambda: Net(lambda m, x: m.mix(x, torch.tanh(x)), mix=nn.Bilinear(WIDTH, WIDTH, WIDTH)))
zoo("ResNet with group norm",
    lambda: classifier(conv(3, 8), *(res_block(nn.GroupNorm(2, 8)) for _ in range(3))), IMAGES)  # fmt: skip
zoo("ResNet with instance norm",
    lambda: classifier(conv(3, 8), *(res_block(nn.InstanceNorm2d(8, affine=True)) for _ in range(2))), IMAGES)  # fmt: skip
zoo("ResNet with frozen batch norm", lambda: classifier(conv(3, 8), *(
    res_block(nn.BatchNorm2d(8).requires_grad_(False).eval()) for _ in range(2))).train(False), IMAGES)  # fmt: skip
zoo("batch norm", lambda: classifier(conv(3, 8, nn.BatchNorm2d(8)), conv(8, 8, nn.BatchNorm2d(8))), IMAGES)
zoo("batch norm 1d", lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDTH)))
zoo("running statistics of instance norm", lambda: classifier(
    conv(3, 8, nn.InstanceNorm2d(8, track_running_stats=True))), IMAGES)  # fmt: skip
zoo("UNet", unet, floats(3, 8, 8, out=(3, 8, 8)))
zoo("ViT", vit, IMAGES)
zoo("channels-last input", lambda: classifier(conv(3, 8), conv(8, 8)),
    changed(IMAGES, lambda x, _: x.to(memory_format=torch.channels_last)))  # fmt: skip
zoo("channels-last weights", lambda: classifier(conv(3, 8), conv(8, 8)).to(memory_format=torch.channels_last), IMAGES)
zoo("MLP mixer", lambda: nn.Sequential(nn.Unflatten(1, (4, WIDTH)), *(
    Net(lambda m, x: x + m.rows(x.mT).mT + m.columns(x), rows=mlp(4), columns=mlp()) for _ in range(2)), nn.Flatten()),
    floats(32, out=(32,)))  # fmt: skip
zoo(
    "squeeze and excitation",
    lambda: classifier(
        conv(3, 8),
        *(Net(lambda m, x: x * torch.sigmoid(m.gate(x.mean((2, 3))))[..., None, None], gate=mlp()) for _ in range(2)),
    ),
    IMAGES,
)
zoo("autoencoder", lambda: Net(lambda m, x: m.decode(torch.tanh(m.encode(x))), encode=mlp(), decode=mlp()))
zoo("dense net", lambda: Net(lambda m, x: m.head(_dense(m, x)), blocks=[nn.Linear(8 * (i + 1), 8) for i in range(3)],
    head=nn.Linear(32, WIDTH)))  # fmt: skip
zoo("mixture of depths of resolution", lambda: Net(
    lambda m, x: m.head(sum(chain(m, x[..., ::step].repeat_interleave(step, -1)) for step in (1, 2))),
    blocks=[mlp() for _ in range(2)], head=nn.Linear(WIDTH, WIDTH)))  # fmt: skip


def _dense(model: Net, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = torch.cat([x, torch.tanh(block(x))], -1)
    return x


class Views(nn.Module):
    """Returns another view of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).view(-1, 2, WIDTH // 2)


def doubled(model: Net, x: torch.Tensor) -> torch.Tensor:
    """Changes what its blocks have returned."""
    for block in model.blocks:
        y = block(x)
        y.mul_(2)
        x = y.view(-1, WIDTH)
    return model.head(x)


zoo("a block's view changed in place", lambda: Net(doubled, blocks=[Views(), Views()], head=nn.Linear(8, 8)))
