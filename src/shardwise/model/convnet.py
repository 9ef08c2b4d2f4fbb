"""Profiles of residual convolutional networks from their description, such as ResNet-50.

A sample is one image. Counted: convolutions as implicit GEMMs, batch norms over fp32 statistics, in-place ReLU and
in-place residual sums, as the usual implementation runs them. Not counted: the norms' running statistics (buffers, 8
bytes a channel), and cuDNN's workspace, which depends on its algorithm.

Source of the ResNet-50 description: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385,
table 1, with the stride in the 3×3 convolution (the variant of 25,557,032 parameters).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.model.operations import cross_entropy, matmul, pointwise
from shardwise.model.profile import ModelProfile, Op, Unit, Weight

EXPANSION = 4  # a bottleneck's output channels over its width


@dataclass(frozen=True, slots=True)
class ConvNet:
    """Residual network of bottlenecks: (width, blocks, stride of the first) of each stage."""

    name: str
    stages: tuple[tuple[int, int, int], ...]
    stem: int = 64
    classes: int = 1000
    image: int = 224
    channels: int = 3
    source: str = ""


RESNET_50 = ConvNet(
    "resnet-50", ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)), source="arXiv:1512.03385, table 1"
)
CONVNETS = {net.name: net for net in (RESNET_50,)}


def convnet_profile(net: ConvNet, image: int | None = None) -> ModelProfile:
    """Count ``net`` over square images of ``image`` pixels.

    Consecutive equal blocks are one unit.
    """
    side = image or net.image
    units = [_stem(net, side)]
    side, width = -(-side // 4), net.stem
    for stage, (narrow, blocks, stride) in enumerate(net.stages, start=1):
        units.append(_bottleneck(f"stage{stage}.first", width, narrow, side, stride))
        side, width = -(-side // stride), narrow * EXPANSION
        if blocks > 1:
            units.append(replace(_bottleneck(f"stage{stage}.block", width, narrow, side, 1), count=blocks - 1))
    units.append(_classifier(net, width, side))
    return ModelProfile(
        name=net.name, units=tuple(units), seq_len=None, origin="catalogue", vocab_size=net.classes, source=net.source
    )


def conv(name: str, channels: int, out: int, kernel: int, side_in: int, side_out: int, *, saved: int) -> Op:
    """Square ungrouped convolution as implicit GEMM.

    ``saved`` is its input, if not saved before.
    """
    m, k = side_out**2, channels * kernel**2
    moved = channels * side_in**2 + k * out + m * out
    return Op(name, "conv", m, k, out, flops=2.0 * m * k * out, moved=moved, saved=saved, weight=True)


def _batch_norm(name: str, elements: int, channels: int) -> Op:
    """Batch norm: saves its input and two statistics a channel.

    Reads the input twice, for the statistics and to normalise. A second small kernel counts the batches.
    """
    return Op(
        name,
        "norm",
        moved=3 * elements,
        launches=2,
        saved=elements,
        saved_fp32=2 * channels,
        temporary=elements,
        fusible=True,
    )


def _conv_weights(name: str, channels: int, out: int, kernel: int) -> tuple[Weight, ...]:
    shape = (out, channels, kernel, kernel)
    return Weight(f"{name}.conv.weight", shape), Weight(f"{name}.bn.weight", (out,)), Weight(f"{name}.bn.bias", (out,))


def _stem(net: ConvNet, side: int) -> Unit:
    """Stem: 7×7 convolution of stride 2, norm, ReLU, 3×3 max pool of stride 2.

    The pool saves an index (8 bytes) per output.
    """
    half, quarter = -(-side // 2), -(-side // 4)
    out, pooled = half**2 * net.stem, quarter**2 * net.stem
    ops = (
        conv("conv1", net.channels, net.stem, 7, side, half, saved=net.channels * side**2),
        replace(_batch_norm("bn1", out, net.stem), temporary=0),
        pointwise("relu", 2 * out, saved=out),
        Op("pool", "pointwise", moved=out + pooled, saved_bytes=8 * pooled),
    )
    return Unit("stem", "embedding", _conv_weights("stem", net.channels, net.stem, 7), ops, net.channels * side**2)


def _bottleneck(name: str, channels: int, width: int, side: int, stride: int) -> Unit:
    """Bottleneck: 1×1, 3×3 and 1×1 convolution, each with a norm.

    A 1×1 shortcut where the shape changes. The block's input counts as saved here, by its first convolution; its output
    by the next block. A norm saves its input, and ReLU its output, which is the next convolution's input.
    """
    small, out = -(-side // stride), width * EXPANSION
    mid_in, mid, end = side**2 * width, small**2 * width, small**2 * out
    ops = [
        conv("conv1", channels, width, 1, side, side, saved=side**2 * channels),
        replace(_batch_norm("bn1", mid_in, width), temporary=0),
        pointwise("relu1", 2 * mid_in, saved=mid_in),
        conv("conv2", width, width, 3, side, small, saved=0),
        replace(_batch_norm("bn2", mid, width), temporary=0),
        pointwise("relu2", 2 * mid, saved=mid),
        conv("conv3", width, out, 1, small, small, saved=0),
        replace(_batch_norm("bn3", end, out), temporary=0),
    ]
    weights = [
        *_conv_weights("1", channels, width, 1),
        *_conv_weights("2", width, width, 3),
        *_conv_weights("3", width, out, 1),
    ]
    if stride != 1 or channels != out:
        shortcut = conv("shortcut", channels, out, 1, side, small, saved=0)
        if stride != 1:  # only every stride-th element of the input is read
            shortcut = replace(shortcut, moved=shortcut.moved - channels * (side**2 - small**2))
        ops += [shortcut, _batch_norm("shortcut_bn", end, out)]
        weights += _conv_weights("shortcut", channels, out, 1)
    ops += [pointwise("residual", 3 * end), pointwise("relu3", 2 * end)]
    return Unit(name, "block", tuple(weights), tuple(ops), side**2 * channels)


def _classifier(net: ConvNet, width: int, side: int) -> Unit:
    """Average pool, linear layer, loss.

    The pool saves its input, which is the last block's output.
    """
    full = side**2 * width
    ops = (
        pointwise("pool", full + width, saved=full),
        matmul("fc", 1, width, net.classes, saved=width),
        cross_entropy(1, net.classes),
    )
    weights = (Weight("fc.weight", (net.classes, width)), Weight("fc.bias", (net.classes,)))
    return Unit("head", "head", weights, ops, full)
