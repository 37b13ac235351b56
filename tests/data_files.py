"""Small data sets in the published layouts, and what tests of them share."""

import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch


def seed(n: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refused(*words: str):
    """pytest.raises for a one-sentence ValueError that has these words in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words)) + r"[^\n]*\.$")


# The real files, where they are at hand

SHARED = Path(os.environ.get("MULO_DATA") or Path(__file__).parents[2] / "shared" / "data")


def real(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"the real files are not at hand: no {SHARED / name}")
    return SHARED / name


# Fashion-MNIST: IDX


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 2048 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


X28 = np.arange(3 * 784).reshape(3, 28, 28).astype(np.uint8)

Y3 = np.array([9, 0, 4], np.uint8)


# CIFAR-10: records of a label and 3072 bytes

ALL = [f"data_batch_{k}.bin" for k in range(1, 6)]


def records(n: int, labels=None) -> bytes:
    r = np.random.default_rng(n).integers(0, 256, (n, 3073)).astype(np.uint8)
    r[:, 0] = np.arange(n) % 10 if labels is None else labels
    return r.tobytes()


def cifar(root: Path, *names: str, content: bytes | None = None) -> Path:
    folder = root / "cifar10/cifar-10-batches-bin"
    for k, name in enumerate(names):
        put(folder / name, records(k + 2) if content is None else content)
    return folder
