"""The tasks that learned optimizers train on: the paper's and ours, by name.

    task = get("fashion8_mlp_w64_d3")
    batch = task.data().batch([generator] * 16, task.batch_size)
    theta = task.init(16, generator)         # 16 nets in one dict of tensors (16, ...)
    losses = task.losses(theta, batch)       # (16,), one autograd graph, no loop

A name is kind, width and depth; `get` refuses those that do not fit (a resnet has 18 layers). The
suffix _b16 sets the batch size to 16. KINDS has the paper's kinds and ours: the same models and a
small conv net on data that needs no download (fashion, pixels, teacher), on CIFAR-10 and on any
text. A task's parametrization is in `rules`: μP, SP or anything between.

To add a kind of your own, call `register` at the top level of a script, because worker processes
import it, and then metatrain.main() or evaluate.main(), as examples/own_task.py does:

    tasks.register("sines", build, Sines, loss, loss_bound=0.75)

- build(width, depth) makes the model, without buffers. Its roles are inferred. Layers and
  embeddings are initialized by role; other parameters keep the values that build gives them.
- data(device) makes a data set, an object with `shape` (of one input), `classes` (None if targets
  are not classes) and batch(generators, size), a tuple of inputs and targets on the device,
  (len(generators), size, ...) each. Draw row k from generators[k] alone, on the CPU: then a seed
  gives the same batches on every device.
- loss(output, *targets) is the mean loss of one net over a batch, a scalar of 0 or more; by default
  the cross-entropy. torch.vmap runs it and the model, so they may not branch on values of tensors.
- loss_bound: PES clips losses at this value, and a diverged net counts as this much. By default 1.5
  log(classes), 1.5 times the loss of guessing.

evaluate.py trains again when the script has changed; in a notebook, rename an edited kind.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from mulo.optimizees import datasets
from mulo.optimizees.datasets import Batch
from mulo.roles import ALL, infer_roles, initial_std, multiply_outputs_, weights_of

Theta = dict[str, Tensor]  # parameters of P nets by name, (P, *shape) each

# ---------------------------------------------------------------- models
# Plain PyTorch modules of any width. The only part of μP here is the scale of attention logits.


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
    paper's deep tasks have 3 heads at width 1024: each is 341 wide, 1,023 in all.
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


# ---------------------------------------------------------------- tasks


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its parametrization and its data. `get` makes one from a name and KINDS."""

    family: str  # "mlp", "vit", "lm", "resnet", "conv" or "own"
    dataset: str  # a name for datasets.load
    shape: tuple[int, ...]  # of one input: (channels, height, width), (features,) or (length,)
    classes: int | None  # or the vocabulary size
    batch_size: int
    patch: int = 0
    heads: int = 0
    name: str = ""
    width: int = 0
    depth: int = 0  # weight layers (mlp), blocks (vit, lm), convolutions; a resnet has 18 layers
    rules: tuple[str, ...] = ALL  # μP; () is SP
    loss_bound: float | None = None  # where PES clips a loss; by default 1.5 log(classes)
    own: Own | None = None  # of a registered kind
    split: str = "all"  # of the data; "train" leaves out the test data

    @property
    def kind(self) -> str:
        return self.name[: self.name.rindex("_w")]

    def build(self, width: int | None = None) -> nn.Module:
        """The model without multipliers, at any width: to infer roles. To train, use `model`."""
        width, depth = width or self.width, self.depth
        logit_power = -1.0 if "multiplier" in self.rules else -0.5
        if self.own:
            return self.own.build(width, depth)
        if self.family == "mlp":
            return MLP(math.prod(self.shape), self.classes, width, depth)
        if self.family == "vit":
            return ViT(self.shape, self.classes, width, depth, self.heads, self.patch, logit_power)
        if self.family == "lm":
            return LM(self.classes, self.shape[0], width, depth, self.heads, logit_power)
        if self.family == "conv":
            return ConvNet(self.shape[0], self.classes, width, depth)
        return ResNet(self.shape[0], self.classes, width)

    @functools.cache  # noqa: B019 (tasks are small)
    def roles(self) -> dict[str, str]:
        return infer_roles(self.build, self.width)

    @functools.cache  # noqa: B019
    def skeleton(self) -> nn.Module:
        """The model on the meta device, to be called with parameters (torch.func)."""
        with torch.device("meta"):
            model = self.build()
        for name, _ in model.named_buffers():
            fix = "compute it in forward, or use a norm without running statistics"
            raise ValueError(f"{self.kind} has a buffer {name!r}, which stacked nets lack: {fix}.")
        multiply_outputs_(model, self.roles(), self.rules)
        return model

    def init(self, P: int, generator: torch.Generator, zero_output: bool = True) -> Theta:
        """Initial parameters of P nets, on the generator's device.

        Like roles.init_, but under μP all biases are N(0, 1), as in the paper's code.
        """
        theta, as_built = {}, []
        for w in weights_of(self.skeleton()):
            std = initial_std(w, self.roles()[w.name], self.rules, zero_output)
            p = theta[w.name] = torch.zeros(P, *w.param.shape, device=generator.device)
            if std:
                p.normal_(0, std, generator=generator)
            elif std is None and self.own:  # norms and bare parameters
                as_built.append(w.name)
            elif std is None:  # norms
                p.fill_(w.name.endswith("weight"))
        for net in range(P if as_built else 0):
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(int(seed))
                model = self.build()
            for name in as_built:
                theta[name][net] = model.get_parameter(name).detach()
        return theta

    def model(self, generator: torch.Generator, zero_output: bool = True) -> nn.Module:
        """One initialized net, to train with a torch Optimizer."""
        theta = self.init(1, generator, zero_output)
        model = copy.deepcopy(self.skeleton()).to_empty(device=generator.device)
        model.load_state_dict({name: p[0] for name, p in theta.items()})
        return model

    def data(self, device: str = "cpu"):
        """The data set. datasets.load documents where its files must be."""
        if self.own:
            return _own_data(self.own, device)
        data = datasets.load(self.dataset, None, device, self.shape[-1], self.split)
        if (data.shape, data.classes) != (self.shape, self.classes):
            got = f"{self.dataset} has inputs {data.shape} and {data.classes} classes"
            raise ValueError(f"{got}, but {self.name} takes {self.shape} and {self.classes}.")
        return data

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of one net on a batch: by default the cross-entropy.

        Batches are (x, y), or (tokens, targets, mask); mask is False at padding, which is ignored.
        """
        x, *targets = batch
        loss = (self.own.loss if self.own else _cross_entropy)(model(x), *targets)
        if loss.ndim:
            shape = tuple(loss.shape)
            raise ValueError(f"the loss of {self.kind} is {shape}, not a scalar: take its mean.")
        return loss

    def losses(self, theta: Theta, batch: Batch) -> Tensor:
        """The loss of each of P nets, (P,), from parameters (P, ...) and a batch (P, b, ...).

        Nets do not interact: differentiate the sum. An MLP takes stacked parameters, which is
        several times faster than a loop over nets; vmap, for the others, is as fast as a loop.
        """
        model = partial(functional_call, self.skeleton())
        if self.family == "mlp":
            x, y = batch
            logits = model(theta, (x,))  # (P, b, classes)
            return F.cross_entropy(logits.mT, y, reduction="none").mean(1)
        return torch.vmap(lambda p, *b: self.loss(partial(model, p), b))(theta, *batch)


def _cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")
    if mask is None:
        return losses.mean()
    mask = mask.flatten()
    return (losses * mask).sum() / mask.sum().clamp_min(1)


class Own(NamedTuple):
    """A registered kind. The top of this file describes its parts."""

    build: Callable[[int, int], nn.Module]
    data: Callable[[str], object]
    loss: Callable[..., Tensor]
    digest: str  # hash of the file that registered it; "" in a notebook


@functools.cache
def _own_data(own: Own, device: str):
    """The data set of a registered kind, checked once and cached."""
    data = own.data(device)
    # Checked, because batches of other shapes can fit the number of nets by coincidence.
    shapes = [tuple(x.shape) for x in data.batch([torch.Generator()] * 3, 2)]
    expected = (3, 2, *data.shape)
    if shapes[0] != expected or any(shape[:2] != (3, 2) for shape in shapes):
        fix = f"make the inputs {expected}, then the targets (3, 2, ...)"
        raise ValueError(f"batch(3 generators, 2) gives {shapes}: {fix}.")
    return data


# The paper's kinds, then ours: on data that needs no download, and on data in $MULO_DATA.
# DIVERGES: the paper does not give the patch size of the ViTs (here 4), the batch size of the
# ResNets (128) and the sequence length of the deep LM (64, that of the other LMs).
KINDS = {
    "in32_mlp": Task("mlp", "imagenet32", (3, 32, 32), 1000, 4096),
    "in64_mlp": Task("mlp", "imagenet64", (3, 64, 64), 1000, 4096),
    "c10_mlp": Task("mlp", "cifar10", (3, 32, 32), 10, 4096),
    "vit": Task("vit", "imagenet32", (3, 32, 32), 1000, 1024, patch=4),
    "lm": Task("lm", "lm1b", (64,), 32_000, 128),
    "resnet": Task("resnet", "imagenet32", (3, 32, 32), 1000, 128),
    "fashion_mlp": Task("mlp", "fashion10k", (1, 28, 28), 10, 128),
    "fashion8_mlp": Task("mlp", "fashion10k", (1, 8, 8), 10, 64),
    "fashion14_mlp": Task("mlp", "fashion10k", (1, 14, 14), 10, 64),
    **{
        f"teacher{name}_mlp": Task("mlp", f"teacher{name}", (x["dim"],), x["classes"], 64)
        for name, x in datasets.TEACHERS.items()
    },
    "fashion_vit": Task("vit", "fashion10k", (1, 14, 14), 10, 64, patch=2),
    "pixels_lm": Task("lm", "pixels", (64,), datasets.GREYS + 1, 64),
    "fashion_resnet": Task("resnet", "fashion10k", (1, 14, 14), 10, 64),
    "fashion_conv": Task("conv", "fashion10k", (1, 14, 14), 10, 64),
    "c10s_mlp": Task("mlp", "cifar10k", (3, 16, 16), 10, 64),
    "c10b_mlp": Task("mlp", "cifar10k", (3, 32, 32), 10, 64),
    "c10s_conv": Task("conv", "cifar10k", (3, 16, 16), 10, 64),
    "c10s_vit": Task("vit", "cifar10k", (3, 16, 16), 10, 64, patch=4),
    "text_lm": Task("lm", "text:input.txt", (64,), 256, 64),
}
# The paper's widths: 128 to 8192 for MLPs (to 4096 on 64x64 images), 128 to 2048 for the ResNet,
# those in HEADS for the ViT and the LM; depth 3. Its table mislabels a row of c10_mlp, which is of
# width 1024.
HEADS = {192: 3, 384: 6, 768: 8, 1024: 8, 2048: 16, 3072: 16}  # of attention, by width
DEEP = {  # the paper's deep tasks, and where they differ from their kind
    "in32_mlp_w1024_d16": {"batch_size": 128},
    "vit_w1024_d16": {"batch_size": 128, "heads": 3},
    "lm_w1024_d16": {"batch_size": 128, "heads": 3},
}


def register(
    name: str,
    build: Callable[[int, int], nn.Module],
    data: Callable[[str], object],
    loss: Callable[..., Tensor] | None = None,
    batch_size: int = 64,
    loss_bound: float | None = None,
) -> None:
    """Add a kind of your own; the top of this file describes the arguments."""
    if not re.fullmatch(r"[A-Za-z]\w*", name) or (name in KINDS and not KINDS[name].own):
        taken = ", ".join(KINDS)
        raise ValueError(f"{name!r} cannot be registered: use an identifier other than {taken}.")
    file = Path(inspect.currentframe().f_back.f_globals.get("__file__", ""))  # of the caller
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    own = Own(build, data, loss or _cross_entropy, digest)
    KINDS[name] = Task("own", "own", (), None, batch_size, loss_bound=loss_bound, own=own)


def get(name: str, **changes) -> Task:
    """The task of this name, such as in32_mlp_w128_d3 or resnet_w128, with some fields changed.

    get(name, rules=()) is in SP; get("text_lm_w64_d3", dataset="text:book.txt") is of a text.
    """
    match = re.fullmatch(r"(.+?)_w(\d+)(?:_d(\d+))?(?:_b(\d+))?", name)
    if not match:
        example = "a name is kind, width and depth, such as fashion8_mlp_w64_d3"
        raise ValueError(f"unknown task {name!r}: {example}.")
    if match[1] not in KINDS:
        raise ValueError(f"unknown kind {match[1]!r}: use one of {', '.join(KINDS)}.")
    kind, width, depth = KINDS[match[1]], int(match[2]), int(match[3] or 18)
    resnet = kind.family == "resnet"
    if not match[3] and not resnet:
        raise ValueError(f"{name!r} has no depth: use {match[1]}_w{width}_d3.")
    name = f"{match[1]}_w{width}" + ("" if resnet else f"_d{depth}")
    fields = {"name": name, "width": width, "depth": depth} | DEEP.get(name, {})
    if match[4]:
        fields |= {"name": f"{name}_b{match[4]}", "batch_size": int(match[4])}
    if kind.own:
        data = _own_data(kind.own, "cpu")
        fields |= {"shape": tuple(data.shape), "classes": data.classes}
    if kind.family in ("vit", "lm"):  # not one of the paper's: the fewest heads of size 64 or less
        fitting = (h for h in range(1, width // 16 + 1) if width % h == 0 and width // h <= 64)
        fields = {"heads": HEADS.get(width) or next(fitting, 1)} | fields
    task = dataclasses.replace(kind, **(fields | changes))
    task = dataclasses.replace(task, rules=tuple(task.rules))  # hashable, for the caches
    if resnet and (task.width % 32 or task.depth != 18):
        raise ValueError(f"{name}: a resnet's width is a multiple of 32, its depth 18.")
    width, depth = max(1, task.heads), 2 if task.family == "mlp" else 1
    if task.width < width or task.depth < depth or task.batch_size < 1:
        raise ValueError(f"{name} is too small: use w{width}_d{depth} or more, b1 or more.")
    if task.own and task.split != "all":
        raise ValueError(f"{task.kind} is registered, so it has no test data: drop --test.")
    if task.loss_bound is None:
        if not task.classes:
            raise ValueError(f"{task.kind} has no classes: give tasks.register a loss_bound.")
        return dataclasses.replace(task, loss_bound=1.5 * math.log(task.classes))
    if not 0 < task.loss_bound < math.inf:
        raise ValueError(f"loss_bound must be a number above 0, not {task.loss_bound!r}.")
    return task
