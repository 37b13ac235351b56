"""What learned optimizers train: the paper's optimizees and ours, by name, ready to stack.

    python tasks.py                        # lists every task
    python tasks.py in32_mlp_w128_d3       # one of them: its model, its data, its roles
    python tasks.py download cifar10       # asks for data; nothing else ever downloads

    task = get("fashion8_mlp_w64_d3")
    batch = task.data().batch(generator, task.batch_size, particles=16)
    params = task.init(16, generator)        # 16 nets in one dict of tensors (16, ...)
    losses = task.losses(params, batch)      # (16,), one autograd graph, no loop

Paper: the table "Meta-testing settings" and the ResNet table. A name is kind, width and depth; any
width and depth will do. Kinds without a prefix for their data are the paper's: vit and resnet on
ImageNet at 32x32, lm on LM1B. Desk kinds are the same models on data that ships with the code.
Models are the same code in SP and μP: `rules` says which of μP's rules are on.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import re
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import data
import datafiles
import mup

# ---------------------------------------------------------------- models


class Linear(nn.Linear):
    """A linear layer whose parameters may be stacked, (P, out, in): it then takes x (P, b, in)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.ndim == 2:
            return super().forward(x)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.mT)


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
    """Self-attention with logits over d_head under μP, over its root in SP (DIVERGES: unsaid).

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
        self.positions = nn.Embedding((height // patch) * (across // patch), width)
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
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, True, power) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:  # (b, t) -> (b, t, vocabulary)
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
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


GROUPS = 4


class ResNet(nn.Module):
    """ResNet-18 for small images (3x3 stem, no pooling); `width` is the channels of its last stage.

    The paper gives widths only. GroupNorm, not BatchNorm: running statistics are state outside the
    parameters, which neither functional calls nor stacked particles can share or restore.
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


# ---------------------------------------------------------------- tasks


@dataclasses.dataclass(frozen=True)
class Task:
    """One optimizee and its data. `get` makes them from names."""

    name: str
    family: str  # "mlp", "vit", "lm" or "resnet"
    dataset: str  # a name that data.load knows
    width: int
    depth: int  # weight layers (mlp), blocks (vit, lm); a resnet has 18 layers
    shape: tuple[int, ...]  # of one input: (channels, height, width), (features,) or (length,)
    classes: int  # or the size of the vocabulary
    batch_size: int
    heads: int = 0
    patch: int = 0
    size: int | None = None  # images are pooled to this size

    def build(self, width: int | None = None, rules: Iterable[str] = mup.ALL) -> nn.Module:
        """The bare model at any width, as torch initialises it; see `model` for one to train."""
        w, power = width or self.width, -1.0 if "multiplier" in tuple(rules) else -0.5
        if self.family == "mlp":
            return MLP(math.prod(self.shape), self.classes, w, self.depth)
        if self.family == "vit":
            args = (w, self.depth, self.heads, self.patch, power)
            return ViT(self.shape, self.classes, *args)
        if self.family == "lm":
            return LM(self.classes, self.shape[0], w, self.depth, self.heads, power)
        return ResNet(self.shape[0], self.classes, w)

    @functools.cache  # noqa: B019 - tasks are few and small
    def roles(self) -> dict[str, str]:
        return mup.infer_roles(self.build, self.width)

    def skeleton(self, rules: Iterable[str] = mup.ALL) -> nn.Module:
        """The model without memory, on the meta device, to be called with parameters."""
        with torch.device("meta"):
            model = self.build(rules=rules)
        mup.multiply_outputs_(model, self.roles(), rules)
        return model

    def init(
        self,
        particles: int,
        generator: torch.Generator,
        rules: Iterable[str] = mup.ALL,
        zero_output: bool = True,
    ) -> dict[str, Tensor]:
        """Initial parameters of `particles` nets, (particles, ...) each, on the generator's device.

        By role as in mup.init_. Biases are N(0, 1) under μP and zero in SP, as in the paper's code.
        """
        rules, roles, device = tuple(rules), self.roles(), generator.device
        params = {}
        for w in mup.weights_of(self.skeleton(rules)):
            role = roles[w.name]
            if w.kind == "vector":
                std = float("init" in rules and isinstance(w.module, mup.LAYERS))
            else:
                std = w.fan_in ** (mup.power(role, "init", rules) / 2)
            p = torch.zeros(particles, *w.param.shape, device=device)
            if isinstance(w.module, mup.NORMS) and w.name.endswith("weight"):
                p += 1
            elif std and not (role == "output" and zero_output):
                p.normal_(0, std, generator=generator)
            params[w.name] = p
        return params

    def model(
        self,
        generator: torch.Generator,
        rules: Iterable[str] = mup.ALL,
        zero_output: bool = True,
    ) -> nn.Module:
        """One net, initialised, ready for an Optimizer."""
        params = self.init(1, generator, rules, zero_output)
        model = self.skeleton(rules).to_empty(device=generator.device)
        model.load_state_dict({name: p[0] for name, p in params.items()})
        return model

    def data(self, data_dir: str | None = None, device: str = "cpu", **options):
        """The data set: see data.load for where it is looked for and for the options."""
        if self.family == "lm":
            options["seq_len"] = self.shape[0]
        if self.dataset == "pixels":
            return pixels(self.shape[0], self.classes, device)
        return data.load(self.dataset, data_dir, device, size=self.size, **options)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Mean cross-entropy of (x, y), or of (tokens, targets, mask): padding does not count."""
        return _cross_entropy(model(batch[0]), *batch[1:])

    def losses(
        self,
        params: dict[str, Tensor],  # (P, ...) each
        batch: tuple[Tensor, ...],  # (P, b, ...) each, or (b, ...) if shared
        shared: bool = False,
        rules: Iterable[str] = mup.ALL,
    ) -> Tensor:
        """The loss of every particle, (P,): sum them and differentiate, they do not interact.

        An MLP takes its parameters stacked; the other families go through vmap, which costs more.
        """
        model = _skeleton(self, tuple(rules))
        if self.family == "mlp":
            P = len(next(iter(params.values())))
            x, y = (b.expand(P, *b.shape) for b in batch) if shared else batch
            logits = functional_call(model, params, (x,))  # (P, b, classes)
            return F.cross_entropy(logits.mT, y, reduction="none").mean(1)

        def one(p: dict[str, Tensor], b: tuple[Tensor, ...]) -> Tensor:
            return _cross_entropy(functional_call(model, p, (b[0],)), *b[1:])

        return torch.vmap(one, in_dims=(0, None if shared else 0))(params, tuple(batch))


@functools.cache
def _skeleton(task: Task, rules: tuple[str, ...]) -> nn.Module:
    return task.skeleton(rules)


def _cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    if mask is None:
        return losses.mean()
    mask = mask.flatten()
    return (losses * mask).sum() / mask.sum().clamp_min(1)


def pixels(length: int, vocabulary: int, device: str = "cpu") -> data.Tokens:
    """The embedded images as a language: a start token, then `length` pixels in reading order."""
    levels = vocabulary - 1
    images = data.load("fashion10k", size=math.isqrt(length))
    grey = images.x.flatten(1).long() * levels // 256
    return data.Tokens(F.pad(grey, (1, 0), value=levels), vocabulary, length, device)


# kind: (family, data set, input shape, classes, batch size, depth, more). Paper, table of tasks;
# the patch size of the ViT and the ResNet's batch size are ours, the paper does not give them.
KINDS = {
    "in32_mlp": ("mlp", "imagenet32", (3, 32, 32), 1000, 4096, 3, {}),
    "in64_mlp": ("mlp", "imagenet64", (3, 64, 64), 1000, 4096, 3, {}),
    "c10_mlp": ("mlp", "cifar10", (3, 32, 32), 10, 4096, 3, {}),
    "vit": ("vit", "imagenet32", (3, 32, 32), 1000, 1024, 3, {"patch": 4}),
    "lm": ("lm", "lm1b", (64,), 32_000, 128, 3, {}),
    "resnet": ("resnet", "imagenet32", (3, 32, 32), 1000, 128, 18, {}),
    "fashion_mlp": ("mlp", "fashion10k", (1, 28, 28), 10, 128, 3, {}),
    "fashion8_mlp": ("mlp", "fashion10k", (1, 8, 8), 10, 64, 3, {"size": 8}),
    "teacher_mlp": ("mlp", "teacher", (64,), 10, 64, 3, {}),
    "fashion_vit": ("vit", "fashion10k", (1, 14, 14), 10, 64, 3, {"size": 14, "patch": 2}),
    "pixels_lm": ("lm", "pixels", (64,), 17, 64, 3, {}),  # 16 grey levels and a start token
    "fashion_resnet": ("resnet", "fashion10k", (1, 14, 14), 10, 64, 18, {"size": 14}),
    "c10_vit": ("vit", "cifar10", (3, 32, 32), 10, 128, 3, {"patch": 4}),
    "c10_resnet": ("resnet", "cifar10", (3, 32, 32), 10, 128, 18, {}),
    "text_lm": ("lm", "text:input.txt", (64,), 256, 64, 3, {}),
}
WIDTHS = {
    "in32_mlp": (128, 256, 512, 1024, 2048, 4096, 8192),
    "in64_mlp": (128, 256, 512, 1024, 2048, 4096),
    "c10_mlp": (128, 256, 512, 1024, 2048, 4096, 8192),  # one row is mislabelled: 1024 is meant
    "vit": (192, 384, 768, 1024, 2048, 3072),
    "lm": (192, 384, 768, 1024, 2048, 3072),
}
HEADS = {192: 3, 384: 6, 768: 8, 1024: 8, 2048: 16, 3072: 16}
DEEP = {  # what the paper's three deep tasks have of their own
    "in32_mlp_w1024_d16": {"batch_size": 128},
    "vit_w1024_d16": {"batch_size": 128, "heads": 3},
    "lm_w1024_d16": {"batch_size": 128, "heads": 3},
}
PAPER = [f"{kind}_w{w}_d3" for kind, widths in WIDTHS.items() for w in widths]
PAPER += [*DEEP, *(f"resnet_w{w}" for w in (128, 256, 512, 1024, 2048))]
DESK = [
    f"{kind}_w{w}_d3"
    for kind in ("fashion_mlp", "fashion8_mlp", "teacher_mlp")
    for w in (16, 32, 64)
]
DESK += ["fashion_vit_w32_d3", "pixels_lm_w32_d3", "fashion_resnet_w64"]


def default_heads(width: int) -> int:
    """The paper's number of heads at its widths; elsewhere the fewest of at most 64 that fit."""
    fitting = [h for h in range(1, max(1, width // 16) + 1) if width % h == 0 and width // h <= 64]
    return HEADS.get(width) or (fitting[0] if fitting else 1)


def get(name: str, **changes) -> Task:
    """The task of this name, such as in32_mlp_w128_d3 or resnet_w128; `changes` replace its fields.

    get("text_lm_w64_d3", dataset="text:book.txt") trains on the bytes of any UTF-8 file.
    """
    match = re.fullmatch(r"(\w+?)_w(\d+)(?:_d(\d+))?", name)
    kind = match and KINDS.get(match[1])
    if not kind or (kind[0] == "resnet") == (match[3] is not None):
        near = difflib.get_close_matches(name, PAPER + DESK, 1, 0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown task {name!r}: {hint}`python tasks.py` lists them all.")
    family, dataset, shape, classes, batch_size, depth, more = kind
    width, depth = int(match[2]), int(match[3] or depth)
    least = {"mlp": 2, "resnet": 18}.get(family, 1)
    if depth < least or width < 1 or (family == "resnet" and width % 32):
        raise ValueError(
            f"task {name!r} cannot be built: depth is at least {least}, "
            "and a resnet's width a multiple of 32."
        )
    heads = default_heads(width) if family in ("vit", "lm") else 0
    task = Task(name, family, dataset, width, depth, shape, classes, batch_size, heads, **more)
    return dataclasses.replace(task, **(DEEP.get(name, {}) | changes))


# ---------------------------------------------------------------- command line


def _count(task: Task) -> int:
    return sum(p.numel() for p in task.skeleton().parameters())


def _list() -> None:
    for title, names in (("The paper's tasks", PAPER), ("Desk tasks, on embedded data", DESK)):
        print(f"{title}\n{'name':24}{'data':13}{'parameters':>13}{'batch':>7}{'heads':>7}")
        for name in names:
            task = get(name)
            row = f"{name:24}{task.dataset:13}{_count(task):13,}{task.batch_size:7}"
            print(f"{row}{task.heads or '':>7}")
        print()
    print(f"Any width and depth of these kinds: {', '.join(KINDS)}")


def _show(name: str) -> None:
    task, roles = get(name), get(name).roles()
    print(f"{task}\n\n{'parameter':32}{'shape':>20}  role     fan_in")
    for w in mup.weights_of(task.skeleton()):
        print(f"{w.name:32}{tuple(w.param.shape)!s:>20}  {roles[w.name]:8} {w.fan_in}")
    print(f"{_count(task):,} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description="The tasks that learned optimizers train.")
    parser.add_argument("what", nargs="*", help="a task's name, or: download DATASET")
    parser.add_argument("--data-dir", help="where data is (default: $MULO_DATA, else ./data)")
    args = parser.parse_args()
    try:
        if not args.what:
            _list()
        elif args.what[0] == "download" and len(args.what) == 2:
            datafiles.download(args.what[1], args.data_dir)
        elif len(args.what) == 1:
            _show(args.what[0])
        else:
            parser.error("give a task's name, or: download DATASET")
    except (ValueError, OSError) as error:
        sys.exit(f"tasks.py: {error}")


if __name__ == "__main__":
    main()
