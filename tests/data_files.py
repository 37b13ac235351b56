"""Small files in the published layouts, a server for them, and what their tests share."""

import gzip
import http.server
import io
import os
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from optimizees import files


def seed(n: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refused(*words: str):
    """pytest.raises for a one-sentence ValueError that has these words in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words)) + r"[^\n]*\.$")


PUBLISHED = Path(os.environ.get("MULO_DATA") or Path(__file__).parents[2] / "shared" / "data")


def published(name: str) -> Path:
    """The folder of a data set as published; the test is skipped where it is missing."""
    if not (PUBLISHED / name).is_dir():
        pytest.skip(f"no {PUBLISHED / name}: set MULO_DATA to test the published files")
    return PUBLISHED / name


# Fashion-MNIST: gzipped IDX files

X28 = np.arange(3 * 784).reshape(3, 28, 28).astype(np.uint8)
Y3 = np.array([9, 0, 4], np.uint8)


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 2048 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the same bytes in every run


def fashion(root: Path, x: bytes, y: bytes, prefix: str = "train") -> None:
    put(root / f"fashion-mnist/{prefix}-images-idx3-ubyte.gz", x)
    put(root / f"fashion-mnist/{prefix}-labels-idx1-ubyte.gz", y)


# CIFAR-10: binary records of a label and 3072 bytes, or pickles

TRAINING = [f"data_batch_{k}.bin" for k in range(1, 6)]


def records(n: int, labels=None) -> bytes:
    r = np.random.default_rng(n).integers(0, 256, (n, 3073)).astype(np.uint8)
    r[:, 0] = np.arange(n) % 10 if labels is None else labels
    return r.tobytes()


def cifar(root: Path, *names: str, content: bytes | None = None) -> None:
    for k, name in enumerate(names):
        put(root / "cifar10/cifar-10-batches-bin" / name, content or records(k + 2))


def python2_pickle(x: np.ndarray, y: list[int]) -> bytes:
    """A batch as Python 2 pickled it in 2009: its str are not unicode, numpy.core is numpy 1's."""

    def text(b: bytes) -> bytes:
        return b"T" + struct.pack("<I", len(b)) + b

    def number(n: int) -> bytes:
        return b"J" + struct.pack("<i", n)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN"
    dtype += number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR"
    array += b"(K\x01(" + number(x.shape[0]) + number(x.shape[1]) + b"t" + dtype + b"\x89"
    array += text(x.tobytes()) + b"tb"
    labels = b"](" + b"".join(map(number, y)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


def pickled_batch(root: Path, content: bytes) -> None:
    put(root / "cifar10/cifar-10-batches-py/data_batch_1", content)


# ImageNet: .npz files of flattened images


def imagenet(root: Path, side: int = 32, batches=range(1, 11), **change) -> list[dict]:
    """Write train_data_batch_k.npz of k images each; `change` replaces arrays of the tenth."""
    folder = root / f"imagenet{side}"
    folder.mkdir(exist_ok=True, parents=True)
    r, made = np.random.default_rng(0), []
    for k in batches:
        x = r.integers(0, 256, (k, 3 * side**2)).astype(np.uint8)
        arrays = {"data": x, "labels": r.integers(1, 1001, k), "mean": x.mean(0)}
        arrays |= change if k == 10 else {}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        np.savez(folder / f"train_data_batch_{k}.npz", **arrays)
        made.append(arrays)
    return made


def save_val(root: Path, x: np.ndarray | None = None, y: np.ndarray | None = None) -> Path:
    """A converted validation set of two images, in which x or y may be replaced."""
    folder = root / "imagenet32"
    folder.mkdir(exist_ok=True)
    np.save(folder / "val_x.npy", np.zeros((2, 3, 32, 32), np.uint8) if x is None else x)
    np.save(folder / "val_y.npy", np.array([5, 999]) if y is None else y)
    return folder


# LM1B: one sentence a line


def lm1b(root: Path, *texts: str, split: str = "train") -> None:
    names = {"train": ("training", "news.en-{:05}-of-00100", 1)}
    names["heldout"] = ("heldout", "news.en.heldout-{:05}-of-00050", 0)
    part, name, first = names[split]
    folder = root / "lm1b" / files.LM1B / f"{part}-monolingual.tokenized.shuffled"
    for k, text in enumerate(texts):
        put(folder / name.format(first + k), text.encode())


# A server to download from


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files; can break off after some bytes, and can ignore Range."""

    def do_GET(self):
        s = self.server
        content = s.files.get(self.path.lstrip("/"))
        given = self.headers.get("Range")
        s.requests.append((self.path.lstrip("/"), given))
        if content is None:
            return self.send_error(404)
        start = int(given.removeprefix("bytes=").rstrip("-")) if given and s.ranges else 0
        if start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        stop = len(content) if s.breaks_at is None else s.breaks_at
        self.wfile.write(content[start:stop])

    def log_message(self, *args):
        pass


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return out.getvalue()


class Evil:
    """Unpickling it would call the function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call
