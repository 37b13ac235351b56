"""The data that optimizees train on: images, text and a procedural teacher, without a DataLoader.

    images = load("fashion10k", size=14)                       # in the repository, ready to run
    x, y = images.batch(torch.Generator().manual_seed(0), 64)  # (64, 1, 14, 14) float32, (64,)
    x, y = images.batch([generator1, generator2], 64)          # (2, 64, ...), one from each

A data set is one tensor on the device, with `classes`, `shape` (of one input) and `batch`. A batch
is drawn uniformly, with replacement, by the given generator: the same seed gives the same batches.
The paper uses imagenet32, imagenet64, cifar10 and lm1b; the others are ours. Nothing is downloaded:
a missing file raises an error that says where to get it.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from mulo.checkpoints import write_atomically
from mulo.features import send

EMBEDDED = Path(__file__).parents[1] / "data" / "fashion10k"

# Classes, and mean and std of the pixels (0..255) per channel. ImageNet's are of full resolution.
FASHION = 10, (72.9404,), (90.0212,)
CIFAR10 = 10, (125.3069, 122.9504, 113.8654), (62.9932, 62.0887, 66.7049)
IMAGENET = 1000, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
IMAGES = {
    "fashion10k": FASHION, "pixels": FASHION, "cifar10": CIFAR10, "cifar10k": CIFAR10,
    "imagenet32": IMAGENET, "imagenet64": IMAGENET,
}  # fmt: skip
GREYS = 16  # grey levels of the data set "pixels"
TEACHERS = {  # teacher, teacher256, ...
    "": {"dim": 64, "classes": 10, "seed": 0},
    "256": {"dim": 256, "classes": 10, "seed": 1},
    "1024": {"dim": 1024, "classes": 10, "seed": 2},
    "2": {"dim": 64, "classes": 2, "seed": 3},
    "100": {"dim": 64, "classes": 100, "seed": 4},
    "v": {"dim": 192, "classes": 5, "seed": 14, "alpha": 0.7},  # for validation
}

Batch = tuple[Tensor, ...]
Generators = torch.Generator | Sequence[torch.Generator]


class Examples:
    """A data set: `draw` draws the random numbers of a batch from one generator, and `take` makes a
    batch of them, or batches of those of several generators."""

    def draw(self, generator: torch.Generator, size: int) -> Batch:
        device = generator.device
        return (torch.randint(len(self), (size,), generator=generator, device=device),)

    def batch(self, generator: Generators, size: int) -> Batch:
        """A tuple of tensors (size, ...); with several generators (len, size, ...)."""
        if isinstance(generator, torch.Generator):
            return self.take(*self.draw(generator, size))
        draws = zip(*(self.draw(g, size) for g in generator), strict=True)
        return self.take(*map(torch.stack, draws))


@dataclasses.dataclass
class Images(Examples):
    """Labelled images, stored as bytes; batches are normalized, (x - mean) / std."""

    x: Tensor  # (N, C, H, W) uint8
    y: Tensor  # (N,) int64
    classes: int
    mean: Sequence[float]  # (C,), of the pixels 0..255
    std: Sequence[float]  # (C,)
    device: torch.device | str = "cpu"

    def __post_init__(self):
        self.shape = tuple(self.x.shape[1:])  # (C, H, W)
        self.x, self.y = self.x.contiguous().to(self.device), self.y.to(self.device)
        mean, std = (torch.tensor(v, device=self.device) for v in (self.mean, self.std))
        area = math.prod(self.shape[1:])
        self._scale = (1 / std).repeat_interleave(area)  # (C H W,)
        self._shift = (-mean / std).repeat_interleave(area)

    def __len__(self) -> int:
        return len(self.x)

    def take(self, i: Tensor) -> Batch:
        """x ([len,] size, C, H, W) float32 and y ([len,] size)."""
        i = send(i, self.device)
        rows = self.x.view(len(self), -1).index_select(0, i.flatten())  # (n, C H W) uint8
        x = torch.addcmul(self._shift, rows, self._scale)
        return x.view(*i.shape, *self.shape), self.y[i]

    def pool(self, size: int) -> Images:
        """The same images averaged down to size x size; mean and std do not change."""
        largest = min(self.shape[1:])
        if not 1 <= size <= largest:
            raise ValueError(f"cannot pool {self.shape} images to size={size}: use 1 to {largest}.")
        parts = [F.adaptive_avg_pool2d(x.float(), size).round_().byte() for x in self.x.split(8192)]
        return dataclasses.replace(self, x=torch.cat(parts))


@dataclasses.dataclass
class Tokens(Examples):
    """Token ids: one long text, cut into windows at random offsets, or one sentence per row.

    The target of a token is the next token. Rows are padded with -1, which is 0 in batches; `mask`
    is False where the target is padding.
    """

    data: Tensor  # (T,), or (N, seq_len + 1) padded with -1; any integer dtype
    classes: int  # the vocabulary size
    seq_len: int
    device: torch.device | str = "cpu"

    def __post_init__(self):
        n, width = self.data.shape[-1], self.seq_len + 1
        if n < width:
            raise ValueError(f"{n} tokens are too few for seq_len={self.seq_len}: get more text.")
        self.shape, self.data = (self.seq_len,), self.data.to(self.device)
        # (N, seq_len + 1); for a long text, a view of all its windows, without a copy
        self._rows = self.data if self.data.ndim == 2 else self.data.unfold(0, width, 1)

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, i: Tensor) -> Batch:
        """tokens, targets and mask, ([len,] size, seq_len) each."""
        rows = self._rows[send(i, self.device)].long()  # ([len,] size, seq_len + 1)
        tokens, targets = rows[..., :-1], rows[..., 1:]
        return tokens.clamp_min(0), targets.clamp_min(0), targets >= 0


@dataclasses.dataclass
class Teacher(Examples):
    """A procedural data set: x_k ~ N(0, s_k^2), y ~ softmax(6 MLP(x)).

    s_k is proportional to k^-alpha, with mean(s^2) = 1. The MLP has two hidden tanh layers and
    random weights. Labels are sampled, so no loss reaches 0. Examples never repeat.
    """

    dim: int = 64
    classes: int = 10
    seed: int = 0
    alpha: float = 0.5
    device: torch.device | str = "cpu"

    def __post_init__(self):
        self.shape = (self.dim,)
        s = torch.arange(1.0, self.dim + 1) ** -self.alpha
        self.std = (s / s.square().mean().sqrt()).to(self.device)  # (dim,)
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [(self.dim, 128), (128, 128), (128, self.classes)]
        weights = [torch.randn(size, generator=generator) / math.sqrt(size[0]) for size in sizes]
        self._weights = [w.to(self.device) for w in weights]

    def log_probs(self, x: Tensor) -> Tensor:
        """log p(y | x), (..., classes), for inputs x (..., dim)."""
        for w in self._weights[:-1]:
            x = torch.tanh(x @ w)
        return torch.log_softmax(6.0 * (x @ self._weights[-1]), -1)

    def draw(self, generator: torch.Generator, size: int) -> Batch:
        z = torch.randn(size, self.dim, generator=generator, device=generator.device)
        return z, z.new_empty(size, self.classes).exponential_(generator=generator)

    def take(self, z: Tensor, e: Tensor) -> Batch:
        """x ([len,] size, dim) float32 and y ([len,] size), by the Gumbel trick."""
        x = send(z, self.device) * self.std
        return x, (self.log_probs(x) - send(e, self.device).log()).argmax(-1)


def fixed_sample(data: Images | Tokens | Teacher, size: int) -> Batch:
    """`size` distinct examples (all, if there are fewer), the same at every call."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(data, Teacher):
        return data.batch(generator, size)
    return data.take(torch.randperm(len(data), generator=generator)[:size])


# ---------------------------------------------------------------- data by name


def load(
    name: str = "fashion10k",
    data_dir: str | os.PathLike | None = None,
    device: torch.device | str = "cpu",
    size: int | None = None,
    split: str = "all",
) -> Images | Tokens | Teacher:
    """Load a data set by name.

    - fashion10k: Fashion-MNIST's 10,000 *test* images, which are in the repository.
    - pixels: fashion10k as a language: a start token, then `size` pixels of 16 grey levels.
    - teacher...: procedural, see TEACHERS.
    - text:<path>: any file, as bytes. A relative path may also be relative to data_dir.
    - cifar10, cifar10k (its first 10,000 training images), imagenet32, imagenet64, lm1b: in
      data_dir (default: $MULO_DATA, else ./data) as published. ImageNet is converted, and LM1B
      tokenized, at first use.

    If a data set has test files, "all" is "train". Else "all" is both splits, and "test" is the
    last 2,000 images or the last tenth of a text. Images are pooled to `size`; for text it is the
    length of the sequences (default: 64).
    """
    kind, _, path = name.partition(":")
    known = [*IMAGES, "lm1b", *(f"teacher{k}" for k in TEACHERS)]
    if kind not in known and not (kind == "text" and path):
        raise ValueError(f"unknown data set {name!r}: use {', '.join(known)} or text:<path>.")
    if split not in ("all", "train", "test"):
        raise ValueError(f"{name} has no split {split!r}: use all, train or test.")
    root = Path(data_dir or os.environ.get("MULO_DATA") or "data").expanduser()
    test, seq_len = split == "test", size or 64
    if kind.startswith("teacher"):
        return Teacher(**TEACHERS[kind.removeprefix("teacher")], device=device)
    if kind == "text":
        file = Path(path) if Path(path).is_file() else root / path
        text = np.fromfile(*_find("text", file.parent, [file.name]), np.uint8)
        return Tokens(torch.from_numpy(_part(text, split, 0.1)), 256, seq_len, device)
    if kind == "lm1b":
        rows, classes = read_lm1b(root / kind, test, seq_len)
        return Tokens(torch.from_numpy(rows), classes, seq_len, device)
    if kind in ("fashion10k", "pixels"):
        x, y = (_part(array, split, 0.2) for array in read_fashion(EMBEDDED))
    elif kind.startswith("cifar10"):
        x, y = read_cifar10(root / "cifar10", test, 1 if kind == "cifar10k" else 5)
    else:
        x, y = read_imagenet(root / kind, int(kind.removeprefix("imagenet")), test)
    images = Images(torch.from_numpy(x), torch.from_numpy(y), *IMAGES[kind])
    if kind == "pixels":
        if math.isqrt(seq_len) ** 2 != seq_len:
            raise ValueError(f"the size of pixels must be a square, such as 64, not {seq_len}.")
        grey = images.pool(math.isqrt(seq_len)).x.flatten(1).long() * GREYS // 256  # (N, seq_len)
        return Tokens(F.pad(grey, (1, 0), value=GREYS), GREYS + 1, seq_len, device)
    same = size in (None, images.shape[-1])
    return dataclasses.replace(images if same else images.pool(size), device=device)


def _part(x: np.ndarray, split: str, share: float) -> np.ndarray:
    """All of x, all but its last share ("train"), or that share ("test")."""
    n = len(x) - round(share * len(x))
    return {"all": x, "train": x[:n], "test": x[n:]}[split]


# ---------------------------------------------------------------- readers of published files

CIFAR10_BYTES = 30_730_000  # of each file
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
HOW_TO_GET = {
    "cifar10": "unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz there",
    "imagenet": "unpack the downsampled npz files of https://image-net.org/download-images there",
    "lm1b": f"unpack https://www.statmt.org/lm-benchmark/{LM1B}.tar.gz there",
    "text": "put any text there, or give text:<path>",
}
Arrays = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) uint8, labels (N,) int64


def _find(name: str, folder: Path, files: list[str]) -> list[Path]:
    """Paths of these files of the data set `name`; all must exist."""
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{name}: {folder} lacks {file}: {HOW_TO_GET[name]}.")
    return [folder / file for file in files]


def read_fashion(folder: Path) -> Arrays:
    """Fashion-MNIST's test data, from IDX files: a header of 16 or 8 bytes, then the array."""
    names = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
    x, y = (gzip.decompress((folder / name).read_bytes()) for name in names)
    x = np.frombuffer(bytearray(x), np.uint8, offset=16)  # writable, as torch requires
    return x.reshape(-1, 1, 28, 28), np.frombuffer(y, np.uint8, offset=8).astype(np.int64)


def read_cifar10(folder: Path, test: bool, parts: int) -> Arrays:
    """From the test file, or the first `parts` training files: a label, 1024 bytes R, G and B."""
    names = ["test_batch.bin"] if test else [f"data_batch_{k + 1}.bin" for k in range(parts)]
    paths = _find("cifar10", folder, [f"cifar-10-batches-bin/{name}" for name in names])
    for path in paths:
        if path.stat().st_size != CIFAR10_BYTES:
            raise ValueError(f"{path} is incomplete: get it again.")
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _read_npz(path: Path, side: int) -> Arrays:
    """Images (N, 3 side^2) and labels 0..999 of a file of downsampled ImageNet."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["data"], arrays["labels"].astype(np.int64) - 1
    except Exception as error:  # a damaged zip can raise anything
        raise ValueError(f"{path} is damaged ({error}): get it again.") from error
    if x.dtype != np.uint8 or x.shape != (len(y), 3 * side**2) or y.min() < 0 or y.max() > 999:
        raise ValueError(f"{path} has no {side}x{side} images of 1,000 classes: get it again.")
    return x, y


def read_imagenet(folder: Path, side: int, test: bool) -> Arrays:
    """Images, memory-mapped from a file that is converted from the .npz files at first use."""
    split, names = "train", [f"train_data_batch_{k}.npz" for k in range(1, 11)]
    if test:
        split, names = "val", ["val_data.npz"]
    x_path, y_path = folder / f"{split}_x.uint8", folder / f"{split}_y.npy"
    if not (x_path.is_file() and y_path.is_file()):
        paths, labels = _find("imagenet", folder, names), []

        def write_images(file) -> None:  # with one .npz in memory at a time
            for path in tqdm(paths, f"converting {folder.name}"):
                x, y = _read_npz(path, side)
                file.write(np.ascontiguousarray(x))
                labels.append(y)

        write_atomically(x_path, write_images)
        write_atomically(y_path, lambda file: np.save(file, np.concatenate(labels)))
    x = np.memmap(x_path, np.uint8, "c")  # "c": torch requires writable memory
    return x.reshape(-1, 3, side, side), np.load(y_path)


def read_lm1b(folder: Path, test: bool, seq_len: int) -> tuple[np.ndarray, int]:
    """Sentences as rows of seq_len + 1 ids, cropped or padded with -1; and the vocabulary size.

    The sentencepiece *.model in the folder tokenizes them at first use, into a file that is
    memory-mapped.
    """
    part, names = "training", [f"news.en-{k:05}-of-00100" for k in range(1, 100)]
    if test:
        part, names = "heldout", [f"news.en.heldout-{k:05}-of-00050" for k in range(50)]
    inner = f"{LM1B}/{part}-monolingual.tokenized.shuffled"
    paths = _find("lm1b", folder, [f"{inner}/{name}" for name in names])
    models = list(folder.glob("*.model"))
    if len(models) != 1:
        fix = "put one sentencepiece model of 32,000 pieces there"
        raise FileNotFoundError(f"lm1b: {folder} has {len(models)} files *.model: {fix}.")
    try:
        import sentencepiece
    except ImportError:
        raise OSError("lm1b needs sentencepiece: pip install sentencepiece.") from None
    content = models[0].read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def rows() -> Iterator[np.ndarray]:
        for path in tqdm(paths, "tokenizing lm1b"):
            for sentence in path.read_bytes().decode(errors="replace").split("\n"):
                if sentence.strip():
                    ids = model.encode(sentence)[: seq_len + 1]
                    yield np.array(ids + [-1] * (seq_len + 1 - len(ids)), np.int32)

    cache = folder / f"{part}_{seq_len}_{hashlib.sha256(content).hexdigest()[:16]}.int32"
    if not cache.is_file():
        write_atomically(cache, lambda file: file.writelines(rows()))
    return np.memmap(cache, np.int32, "c").reshape(-1, seq_len + 1), model.vocab_size()
