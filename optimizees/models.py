"""The paper's nets: MLP, ViT, decoder-only transformer (LM) and ResNet; and a small ConvNet.

Plain PyTorch modules of any width. The only part of μP here is the scale of attention logits;
`tasks.Task` does the rest.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear that also takes stacked parameters: weight (P, out, in) and x (P, b, in).

    Stacked, it computes W x^T, so that the gradient of W is contiguous like W.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(x)
        return torch.baddbmm(self.bias.unsqueeze(2), self.weight, x.mT).mT


def embedding(rows: int, width: int) -> nn.Embedding:
    """nn.Embedding without its default init, which on the meta device takes a second of imports."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


class MLP(nn.Module):
    """An MLP of `depth` weight layers, as the paper counts: input, depth - 2 hidden, output."""

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
    """Multi-head self-attention with logits scaled by d_head^power: -1 in μP, -1/2 in SP.

    DIVERGES: the paper does not give the scale; 1/d_head is what its code and μP for Adam use. The
    paper's deep tasks have 3 heads at width 1024: they are 341 wide, together less than the width.
    """

    def __init__(self, width: int, heads: int, causal: bool, power: float):
        super().__init__()
        self.heads, self.causal, self.d_head = heads, causal, width // heads
        self.scale = self.d_head**power
        self.qkv = nn.Linear(width, 3 * heads * self.d_head, bias=False)
        self.proj = nn.Linear(heads * self.d_head, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (b, t, width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.d_head)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT * self.scale  # (b, heads, t, t)
        if self.causal:
            t = x.shape[1]
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            logits = logits.masked_fill(future, -math.inf)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool, power: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal, power)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (b, t, width)
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer with learned positions; its head takes the mean over tokens."""

    def __init__(
        self, shape: tuple, classes: int, width: int, depth: int, heads: int, patch: int,
        power: float,
    ):  # fmt: skip
        super().__init__()
        c, h, w = shape
        self.patch = nn.Conv2d(c, width, patch, stride=patch)
        self.positions = embedding((h // patch) * (w // patch), width)
        self.blocks = nn.Sequential(*(Block(width, heads, False, power) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (b, c, h, w) -> (b, classes)
        x = self.patch(x).flatten(2).mT + self.positions.weight
        return self.head(self.norm(self.blocks(x)).mean(1))


class LM(nn.Module):
    """A decoder-only transformer whose readout is not tied to the embedding."""

    def __init__(self, classes: int, length: int, width: int, depth: int, heads: int, power: float):
        super().__init__()
        self.tokens, self.positions = embedding(classes, width), embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True, power) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (b, t) -> (b, t, classes)
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


GROUPS = 4  # of the ResNet's GroupNorm


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a skip connection."""

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
    """ResNet-18 for small images: 3x3 stem, no pooling; `width` is the channels of the last stage.

    DIVERGES: the paper gives widths only. GroupNorm replaces BatchNorm, whose running statistics
    are not parameters, so stacked nets cannot have them.
    """

    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        inputs = width // 8
        self.stem = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, inputs)
        blocks = []
        for outputs, stride in ((width // 8, 1), (width // 4, 2), (width // 2, 2), (width, 2)):
            blocks += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (b, channels, h, w) -> (b, classes)
        x = self.blocks(self.norm(self.stem(x)).relu())
        return self.head(x.mean((2, 3)))


class ConvNet(nn.Module):
    """`depth` 3x3 convolutions, all but the first with stride 2, then the mean over pixels."""

    def __init__(self, channels: int, classes: int, width: int, depth: int):
        super().__init__()
        layers = [nn.Conv2d(channels, width, 3, padding=1)]
        layers += [nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(depth - 1)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # (b, channels, h, w) -> (b, classes)
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x.mean((2, 3)))
