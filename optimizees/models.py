"""The paper's optimizees: MLP, ViT, decoder-only transformer (LM) and ResNet, at any width.

Plain PyTorch modules. Their layers are torch's, and also take the parameters of P nets stacked,
(P, ...) each: inputs and outputs are then (P, b, ...). The only part of μP here is the scale of
attention logits; `roles.py` and `Task.init` in `tasks.py` take care of initialization and output
multipliers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """nn.Linear that also takes stacked parameters: weight (P, out, in) and x (P, b, ..., in).

    With few rows it computes W x^T, so that the gradient of W is contiguous like W; with tokens
    x W^T, so that the output is contiguous.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(x)
        if x.ndim == 3:
            return torch.baddbmm(self.bias.unsqueeze(2), self.weight, x.mT).mT
        rows, w = x.flatten(1, -2), self.weight.mT  # (P, n, in), (P, in, out)
        y = rows @ w if self.bias is None else torch.baddbmm(self.bias.unsqueeze(1), rows, w)
        return y.unflatten(1, x.shape[1:-1])


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that also takes stacked parameters: weight (P, width), x (P, b, t, width)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 1:
            return super().forward(x)
        weight, bias = (p[:, None, None] for p in (self.weight, self.bias))
        return F.layer_norm(x, self.normalized_shape, eps=self.eps) * weight + bias


class Embedding(nn.Embedding):
    """nn.Embedding that also takes stacked parameters: weight (P, rows, width) and x (P, b, t).

    Stacked, it looks up in one table of P * rows.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(x)
        P, rows, _ = self.weight.shape
        first = torch.arange(0, P * rows, rows, device=x.device)  # row of each net
        return F.embedding(x + first[:, None, None], self.weight.flatten(0, 1))


def embedding(rows: int, width: int) -> Embedding:
    """Embedding without its default init, which on the meta device takes a second of imports."""
    return Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _side_by_side(x: Tensor) -> Tensor:
    """Images of P nets, (P, b, c, h, w), as images of P * c channels, (b, P * c, h, w)."""
    return x.transpose(0, 1).flatten(1, 2)


def _stacked(x: Tensor, P: int) -> Tensor:
    return x.unflatten(1, (P, -1)).transpose(0, 1)


class Conv2d(nn.Conv2d):
    """nn.Conv2d that also takes stacked parameters: weight (P, out, in, kh, kw), x (P, b, c, h, w).

    Stacked, it is one grouped convolution, with channels last in memory: the fastest on a CPU.
    Layers between convolutions keep that layout, so only the first input is copied.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 4:
            return super().forward(x)
        P, bias = len(self.weight), None if self.bias is None else self.bias.flatten()
        x = _side_by_side(x).contiguous(memory_format=torch.channels_last)
        weight = self.weight.flatten(0, 1)
        return _stacked(F.conv2d(x, weight, bias, self.stride, self.padding, groups=P), P)


class GroupNorm(nn.GroupNorm):
    """nn.GroupNorm that also takes stacked parameters: weight (P, c) and x (P, b, c, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 1:
            return super().forward(x)
        P, parameters = len(self.weight), (self.weight.flatten(), self.bias.flatten())
        y = F.group_norm(_side_by_side(x), P * self.num_groups, *parameters, self.eps)
        return _stacked(y, P)


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
    """Multi-head self-attention with logits scaled by d_head^logit_power: -1 in μP, -1/2 in SP.

    DIVERGES: the paper does not give the scale; 1/d_head is what its code and μP for Adam use.

    d_head is width // heads. If heads do not divide the width (the paper's deep tasks have 3 heads
    at width 1024), queries, keys and values are heads * d_head wide, a little less than the width.
    """

    def __init__(self, width: int, heads: int, causal: bool, logit_power: float):
        super().__init__()
        self.heads, self.causal, self.d_head = heads, causal, width // heads
        self.scale = self.d_head**logit_power
        self.qkv = Linear(width, 3 * heads * self.d_head, bias=False)
        self.proj = Linear(heads * self.d_head, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # ([P,] b, t, width)
        parts = self.qkv(x).flatten(0, -3).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.proj(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool, logit_power: float):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(width, heads, causal, logit_power)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # ([P,] b, t, width)
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer with learned positions; the head sees the mean over tokens."""

    def __init__(
        self, shape: tuple, classes: int, width: int, depth: int, heads: int, patch: int,
        logit_power: float,
    ):  # fmt: skip
        super().__init__()
        c, h, w = shape
        self.patch = Conv2d(c, width, patch, stride=patch)
        self.positions = embedding((h // patch) * (w // patch), width)
        blocks = (Block(width, heads, False, logit_power) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = LayerNorm(width), Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # ([P,] b, c, h, w) -> ([P,] b, classes)
        x = self.patch(x).flatten(-2).mT.contiguous() + self.positions.weight.unsqueeze(-3)
        return self.head(self.norm(self.blocks(x)).mean(-2))


class LM(nn.Module):
    """A decoder-only transformer whose readout is not tied to the embedding."""

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, logit_power: float
    ):
        super().__init__()
        self.tokens, self.positions = embedding(vocabulary, width), embedding(length, width)
        blocks = (Block(width, heads, True, logit_power) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = LayerNorm(width), Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:  # ([P,] b, t) -> ([P,] b, t, vocabulary)
        x = self.tokens(x) + self.positions.weight[..., : x.shape[-1], :].unsqueeze(-3)
        return self.head(self.norm(self.blocks(x)))


GROUPS = 4  # of the ResNet's GroupNorm


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = GroupNorm(GROUPS, outputs), GroupNorm(GROUPS, outputs)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.norm1(self.conv1(x)).relu())
        return (self.norm2(y) + self.skip(x)).relu()


class ResNet(nn.Module):
    """ResNet-18 for small images: 3x3 stem, no pooling; `width` is the channels of the last stage.

    DIVERGES: the paper gives widths only. GroupNorm replaces BatchNorm, whose running statistics
    are state outside the parameters: functional calls and stacked nets have no place for it.
    """

    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        inputs = width // 8
        self.stem = Conv2d(channels, inputs, 3, padding=1, bias=False)
        self.norm = GroupNorm(GROUPS, inputs)
        blocks = []
        for outputs, stride in ((width // 8, 1), (width // 4, 2), (width // 2, 2), (width, 2)):
            blocks += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks, self.head = nn.Sequential(*blocks), Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # ([P,] b, channels, h, w) -> ([P,] b, classes)
        x = self.blocks(self.norm(self.stem(x)).relu())
        return self.head(x.mean((-2, -1)))
