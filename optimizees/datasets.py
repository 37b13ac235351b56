"""The data that optimizees train on: images, text, and a procedural teacher, all without a loader.

    images = load("fashion10k", size=14)                       # in the repository, ready to run
    x, y = images.batch(torch.Generator().manual_seed(0), 64)  # (64, 1, 14, 14) float32, (64,)
    x, y = images.batch(generator, 64, particles=8)            # (8, 64, 1, 14, 14), (8, 64)
    x, y = images.batch([generator, other], 64)                # (2, 64, ...), from each as above

A data set is an array that sits on the device, and a batch is one gather from it at indices drawn
(uniformly, with replacement) from the generator that is passed: same seed, same batches. Every data
set has `classes`, `shape` (of one input) and `batch`. The paper's are imagenet32, imagenet64,
cifar10 and lm1b; fashion10k, fashion, teacher and text:<path> are ours. `files.py` reads
them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from optimizees import files

EMBEDDED = Path(__file__).parents[1] / "data" / "fashion10k"

# Mean and std of the pixels (0..255) by channel. Fashion-MNIST's are measured on its 60,000
# training images, CIFAR-10's are the usual ones, ImageNet's the usual ones of full resolution.
FASHION = (72.9404,), (90.0212,)
CIFAR10 = (125.3069, 122.9504, 113.8654), (62.9932, 62.0887, 66.7049)
IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
STATISTICS = {"fashion10k": FASHION, "pixels": FASHION, "fashion": FASHION, "cifar10": CIFAR10}
STATISTICS |= {"imagenet32": IMAGENET, "imagenet64": IMAGENET}
GREYS = 16  # levels of grey in the language of pixels

Batch = tuple[Tensor, ...]
Generators = torch.Generator | Sequence[torch.Generator]


def _draw(n: int, generator: Generators, size: int, particles: int | None) -> Tensor:
    if not isinstance(generator, torch.Generator):
        return torch.stack([_draw(n, g, size, None) for g in generator])
    shape = (size,) if particles is None else (particles, size)
    return torch.randint(n, shape, generator=generator, device=generator.device)


def _place(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, or where it was when it would take more than half of what is free there."""
    fits = device.type != "cuda" or x.nbytes < torch.cuda.mem_get_info(device)[0] / 2
    return x.to(device) if fits else x


@dataclasses.dataclass
class Images:
    """Labelled images, kept as bytes and normalised, (x - mean) / std, when they are drawn.

    x stays on the CPU (it may be a memory-mapped file) when it does not fit the device; a batch is
    then gathered there and moved.
    """

    x: Tensor  # (N, C, H, W) uint8
    y: Tensor  # (N,) int64
    classes: int
    mean: Sequence[float]  # (C,), of the pixels 0..255
    std: Sequence[float]  # (C,)
    device: torch.device | str = "cpu"  # where batches are wanted

    def __post_init__(self):
        self.device = torch.device(self.device)
        self.shape = tuple(self.x.shape[1:])  # (C, H, W)
        self.x, self.y = _place(self.x.contiguous(), self.device), self.y.to(self.device)
        mean, std = (torch.tensor(v, device=self.device) for v in (self.mean, self.std))
        area = math.prod(self.shape[1:])
        self._scale = (1 / std).repeat_interleave(area)  # (C H W,)
        self._shift = (-mean / std).repeat_interleave(area)
        self._spare: list[tuple[np.ndarray, weakref.ref]] = []  # memory, and its last loan

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_spare": []}  # a copy in another process has its own

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, generator: Generators, size: int, particles: int | None = None) -> Batch:
        """x (size, C, H, W) float32 and y (size,); with `particles`, that many in front of each."""
        i = _draw(len(self), generator, size, particles)
        at = i.flatten().to(self.x.device)
        x = self.x.view(len(self), -1).index_select(0, at).to(self.device)  # (n, C H W)
        x = (
            torch.from_numpy(self._memory(x.shape)).copy_(x)
            if x.device.type == "cpu"
            else x.float()
        )
        torch.addcmul(self._shift, x, self._scale, out=x)
        return x.view(*i.shape, *self.shape), self.y[i.to(self.device)]

    def _memory(self, shape: tuple[int, ...]) -> np.ndarray:
        """Memory for a batch: that of an earlier one which nobody holds any more, if there is one.

        New memory is paid for page by page, which takes longer than all the rest of a batch. What
        is lent is a view: a tensor made of it by from_numpy keeps it alive as long as it, or a view
        of it, lives, so memory is free when its last loan is gone.
        """
        free = [m for m, loan in self._spare if m.shape == tuple(shape) and loan() is None]
        memory = free[0] if free else np.empty(shape, np.float32)
        loan = memory.view()
        others = [pair for pair in self._spare if pair[0] is not memory]
        self._spare = [*others[-1:], (memory, weakref.ref(loan))]
        return loan

    def pool(self, size: int) -> Images:
        """The same images averaged down to size x size and rounded to bytes again.

        mean and std stay those of the full images, so that all splits are normalised alike.
        """
        most = min(self.shape[1:])
        if not 1 <= size <= most:
            raise ValueError(f"cannot pool {self.shape} images to size={size}: use 1 to {most}.")
        pool = F.adaptive_avg_pool2d
        blocks = [pool(block.float(), size).round_().byte() for block in self.x.split(8192)]
        return dataclasses.replace(self, x=torch.cat(blocks))


@dataclasses.dataclass
class Tokens:
    """Text as integers: one running text, cut at random offsets, or one sentence a row.

    The target of a token is the next one. Rows are padded with -1, and `mask` is False where the
    target is padding: the loss is a mean over the mask. Padding itself is handed out as 0.
    """

    data: Tensor  # (T,), or (N, seq_len + 1) padded with -1; any integer type
    classes: int  # the size of the vocabulary
    seq_len: int
    device: torch.device | str = "cpu"  # where batches are wanted

    def __post_init__(self):
        n, width = self.data.shape[-1], self.seq_len + 1
        if n < width or (self.data.ndim == 2 and n != width):
            fix = f"make it {n - 1}"
            if self.data.ndim == 1:
                fix += " or less, or the text longer"
            raise ValueError(f"{n} tokens are not seq_len={self.seq_len} and the next: {fix}.")
        self.device, self.shape = torch.device(self.device), (self.seq_len,)
        self.data = _place(self.data, self.device)
        # (N, seq_len + 1): of a running text a view of all its windows, which takes no memory
        self._rows = self.data if self.data.ndim == 2 else self.data.unfold(0, width, 1)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, generator: Generators, size: int, particles: int | None = None) -> Batch:
        """tokens, targets and mask, (size, seq_len) or (particles, size, seq_len) each."""
        i = _draw(len(self), generator, size, particles)
        rows = self._rows[i.to(self.data.device)].to(self.device).long()  # (..., seq_len + 1)
        tokens, targets = rows[..., :-1], rows[..., 1:]
        return tokens.clamp_min(0), targets.clamp_min(0), targets >= 0


@dataclasses.dataclass
class Teacher:
    """A procedural task without end: x_k ~ N(0, s_k^2), y ~ softmax(temperature * MLP(x)).

    The spectrum s_k is proportional to k^-alpha with mean(s^2) = 1; the MLP is fixed, random (from
    `seed`), of two hidden tanh layers. Labels are drawn, so the loss has a floor above 0, and no
    example comes twice, so nothing can be memorised.
    """

    dim: int = 64
    classes: int = 10
    seed: int = 0
    alpha: float = 0.5
    temperature: float = 6.0
    hidden: int = 128
    device: torch.device | str = "cpu"

    def __post_init__(self):
        self.shape = (self.dim,)
        s = torch.arange(1.0, self.dim + 1) ** -self.alpha
        self.std = (s / s.square().mean().sqrt()).to(self.device)  # (dim,)
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [(self.dim, self.hidden), (self.hidden, self.hidden), (self.hidden, self.classes)]
        weights = [torch.randn(size, generator=generator) / math.sqrt(size[0]) for size in sizes]
        self._weights = [w.to(self.device) for w in weights]

    def log_probs(self, x: Tensor) -> Tensor:
        """log p(y | x), (..., classes), of inputs x (..., dim)."""
        for w in self._weights[:-1]:
            x = torch.tanh(x @ w)
        return torch.log_softmax(self.temperature * (x @ self._weights[-1]), -1)

    def batch(self, generator: Generators, size: int, particles: int | None = None) -> Batch:
        """x (size, dim) float32 and y (size,); with `particles`, that many in front of each."""
        if not isinstance(generator, torch.Generator):
            parts = [self.batch(g, size) for g in generator]
            return tuple(torch.stack(x) for x in zip(*parts, strict=True))
        lead = (size,) if particles is None else (particles, size)
        z = torch.randn(*lead, self.dim, generator=generator, device=generator.device)
        e = z.new_empty(*lead, self.classes).exponential_(generator=generator)
        x = z.to(self.device) * self.std
        return x, (self.log_probs(x) - e.to(self.device).log()).argmax(-1)  # a draw from p(y | x)

    def floor(self, n: int = 100_000, seed: int = 0) -> float:
        """The Bayes loss, the mean entropy of p(y | x), estimated from n inputs."""
        log_p = self.log_probs(self.batch(torch.Generator().manual_seed(seed), n)[0])
        return -(log_p.exp() * log_p).sum(-1).mean().item()


def load(
    name: str = "fashion10k",
    data_dir: str | os.PathLike | None = None,
    device: torch.device | str = "cpu",
    size: int | None = None,
    split: str = "train",
    seq_len: int = 64,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    partial: bool = False,
    check: bool = True,
) -> Images | Tokens | Teacher:
    """A data set by name; nothing is downloaded.

    fashion10k, the default, is Fashion-MNIST's 10,000 *test* images, which are in the repository so
    that everything runs at once: it is not the paper's data, and results on it are not the paper's.
    The others are looked for in data_dir (else $MULO_DATA, else ./data), laid out as published:
    fashion, cifar10, imagenet32, imagenet64 (converted once to .npy there), lm1b; text:<path> is
    any UTF-8 file as bytes (in data_dir, if it is not where it says). teacher is procedural (for
    other sizes and seeds see `Teacher`), and pixels is fashion10k as a language: a start token,
    then seq_len pixels of 16 grey levels in reading order.

    `size` pools images; `seq_len` and `tokenizer` (instead of a sentencepiece .model; its ids are
    taken as they come) are for text. partial=True takes fewer files of cifar10 or lm1b than there
    should be, check=False files laid out like the published ones that differ from them.
    """
    kind, _, path = name.partition(":")
    if kind not in files.SETS or bool(path) != (kind == "text"):
        near = difflib.get_close_matches(name, files.SETS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown data set {name!r}: {hint}There are {', '.join(files.SETS)}:<path>."
        )
    if split not in files.SETS[kind][0]:
        raise ValueError(f"{name} has no split {split!r}: use {' or '.join(files.SETS[kind][0])}.")
    if size is not None and kind in ("teacher", "lm1b", "text", "pixels"):
        raise ValueError(f"size={size} is for images and {name} has none: leave it out.")
    root = files.data_dir_or_default(data_dir)
    if kind == "teacher":
        return Teacher(device=device)
    if kind == "text":
        found = Path(path) if Path(path).is_file() else root / path
        return Tokens(files.read_text(found), 256, seq_len, device)
    if kind == "lm1b":
        rows, classes = files.read_lm1b(root / kind, split, seq_len, tokenizer, partial, check)
        return Tokens(torch.from_numpy(rows), classes, seq_len, device)
    if kind in ("fashion10k", "pixels"):
        x, y = files.read_fashion("fashion10k", EMBEDDED, "t10k", True)
    elif kind == "fashion":
        prefix = "train" if split == "train" else "t10k"
        x, y = files.read_fashion(kind, root / "fashion-mnist", prefix, check)
    elif kind == "cifar10":
        x, y = files.read_cifar10(root / kind, split, partial, check)
    else:
        x, y = files.read_imagenet(kind, root / kind, split)
    mean, std = STATISTICS[kind]
    classes = 1000 if kind.startswith("imagenet") else 10
    images = Images(torch.from_numpy(x), torch.from_numpy(y), classes, mean, std)
    if kind == "pixels":
        return _pixels(images, seq_len, device)
    return dataclasses.replace(images if size is None else images.pool(size), device=device)


def _pixels(images: Images, seq_len: int, device: torch.device | str) -> Tokens:
    side = math.isqrt(seq_len)
    if side**2 != seq_len:
        raise ValueError(f"pixels come in squares, not {seq_len}: make seq_len one, such as 64.")
    grey = images.pool(side).x.flatten(1).long() * GREYS // 256  # (N, seq_len)
    return Tokens(F.pad(grey, (1, 0), value=GREYS), GREYS + 1, seq_len, device)
