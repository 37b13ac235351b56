"""Small files in the published layouts, a server for them, and what their tests share."""

import hashlib
import http.server
import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from mulo.optimizees import files


def seed(n: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def publish(path: Path, content: bytes, monkeypatch) -> Path:
    """Write a file that counts as the published one of its name."""
    monkeypatch.setitem(files.SHA256, path.name, hashlib.sha256(content).hexdigest())
    return put(path, content)


def refused(*words: str):
    """pytest.raises for a one-sentence ValueError that has these words in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words)) + r"[^\n]*\.$")


def published(name: str) -> Path:
    """The folder of a data set as published; the test is skipped where it is missing."""
    folder = os.environ.get("MULO_DATA")
    if not folder or not Path(folder, name).is_dir():
        pytest.skip(f"needs {name} in the folder that $MULO_DATA names")
    return Path(folder, name)


# CIFAR-10: binary records of a label and 3072 bytes

TRAINING = [f"data_batch_{k}.bin" for k in range(1, 6)]


def records(n: int) -> bytes:
    r = np.random.default_rng(n).integers(0, 256, (n, 3073)).astype(np.uint8)
    r[:, 0] = np.arange(n) % 10
    return r.tobytes()


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
        np.savez(folder / f"train_data_batch_{k}.npz", **arrays)
        made.append(arrays)
    return made


# LM1B: one sentence a line


def lm1b(root: Path, text: str, split: str = "train") -> None:
    """The first file has a text, the others are empty."""
    names = {"train": ("training", "news.en-{:05}-of-00100", range(1, 100))}
    names["heldout"] = ("heldout", "news.en.heldout-{:05}-of-00050", range(50))
    part, name, numbers = names[split]
    folder = root / "lm1b" / files.LM1B / f"{part}-monolingual.tokenized.shuffled"
    for k in numbers:
        put(folder / name.format(k), text.encode() if k == numbers[0] else b"")


class FakeProcessor:
    """sentencepiece.SentencePieceProcessor, as far as it is used here: ids are letters."""

    calls = 0

    def __init__(self, model_proto: bytes):
        self.add = model_proto[0]

    def vocab_size(self) -> int:
        return 200

    def encode(self, sentence: str) -> list[int]:
        FakeProcessor.calls += 1
        return [ord(c) + self.add for c in sentence]


# A server to download from


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files."""

    def do_GET(self):
        content = self.server.files.get(self.path.lstrip("/"))
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

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
