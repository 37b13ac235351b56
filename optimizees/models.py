"""The optimizees of the paper: MLP, ViT, decoder-only transformer and ResNet.

Plain modules of any width, with nothing of μP in them but the scale of attention logits, which they
are given. How they are initialised, and their outputs multiplied, is `roles.py`'s business.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer whose parameters may be stacked, (P, out, in): it then takes x (P, b, in).

    As W x^T: the gradient of W is then laid out as W is.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(x)
        return torch.baddbmm(self.bias.unsqueeze(2), self.weight, x.mT).mT


class Table(nn.Embedding):
    """An embedding that is not filled when it is made: `Task.init` does that."""

    def reset_parameters(self) -> None:
        pass


class MLP(nn.Module):
    """`depth` weight layers, as the paper counts: input, depth - 2 hidden, output; ReLU between."""

    def __init__(self, inputs: int, classes: int, width: int, depth: int):
        super().__init__()
        sizes = [inputs, *[width] * (depth - 1)]
        self.layers = nn.ModuleList(map(Linear, sizes[:-1], sizes[1:]))
        self.head = Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # ([P,] b, ...) -> ([P,] b, classes)
        x = x.flatten(self.head.weight.ndim - 1)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


class Attention(nn.Module):
    """Self-attention; logits are divided by d_head under μP, by its root in SP (scale_power).

    DIVERGES: the paper does not say; 1/d_head is what its code and μP for Adam use.

    d_head is width // heads: where heads do not divide the width, as in the paper's deep tasks
    (3 heads of 1024), the inner width is the multiple below it.
    """

    def __init__(self, width: int, heads: int, causal: bool, scale_power: float):
        super().__init__()
        self.heads, self.causal, self.d_head = heads, causal, width // heads
        self.scale = self.d_head**scale_power
        self.qkv = nn.Linear(width, 3 * heads * self.d_head, bias=False)
        self.proj = nn.Linear(heads * self.d_head, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (b, t, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.d_head)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT * self.scale  # (b, heads, t, t)
        if self.causal:
            t = x.shape[1]
            above = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(above, -math.inf)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, ffn: int, causal: bool, scale_power: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal, scale_power)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches, learned positions, blocks, the mean over tokens, a linear head."""

    def __init__(
        self,
        shape: tuple,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        patch: int,
        power: float,
    ):
        super().__init__()
        channels, height, across = shape
        self.patch = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = Table((height // patch) * (across // patch), width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, False, power) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (b, channels, height, width)
        x = self.patch(x).flatten(2).mT + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class LM(nn.Module):
    """A decoder-only transformer over tokens; the readout is not tied to the embedding."""

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, power: float
    ):
        super().__init__()
        self.tokens, self.positions = Table(vocabulary, width), Table(length, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, True, power) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:  # (b, t) -> (b, t, vocabulary)
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


GROUPS = 4  # of the ResNet's GroupNorm


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, normalised, around a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, outputs), nn.GroupNorm(GROUPS, outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.norm1(self.conv1(x)).relu())
        return (self.norm2(y) + self.skip(x)).relu()


class ResNet(nn.Module):
    """ResNet-18 for small images (3x3 stem, no pooling); `width` is the channels of its last stage.

    DIVERGES: the paper gives widths only. GroupNorm, not BatchNorm: running statistics are state
    outside the parameters, which neither functional calls nor stacked particles can share.
    """

    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        stages = [width // 8, width // 4, width // 2, width]
        self.stem = nn.Conv2d(channels, stages[0], 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, stages[0])
        blocks = []
        for k, (inputs, outputs) in enumerate(zip([stages[0], *stages], stages, strict=False)):
            blocks += [ResidualBlock(inputs, outputs, 1 if k == 0 else 2)]
            blocks += [ResidualBlock(outputs, outputs, 1)]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.stem(x)).relu())
        return self.head(x.mean((2, 3)))
