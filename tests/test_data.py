"""Data sets: every reader on small files in the published layout, on hostile ones, on real ones."""

import gzip
import hashlib
import http.server
import io
import math
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import datafiles

SHARED = Path(__file__).parents[2] / "shared" / "data"
TEXTS = f"lm1b/{datafiles.LM1B}"


def seed(n: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def real(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"the real files are not at hand: no {SHARED / name}")
    return SHARED / name


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refused(*words: str):
    """pytest.raises for a one-sentence ValueError that has these words in this order."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words)) + r"[^\n]*\.$")


# Images and their batches


def images(n: int = 50, shape=(3, 4, 4), **kwargs) -> data.Images:
    x = torch.randint(256, (n, *shape), generator=seed(1)).byte()
    channels = shape[0]
    mean, std = [100.0 + c for c in range(channels)], [50.0 + c for c in range(channels)]
    return data.Images(x, torch.arange(n) % 10, 10, mean, std, **kwargs)


def test_batch_gathers_and_normalises():
    d = images()
    d.y = torch.arange(50)  # so that the label tells which image was drawn
    x, y = d.batch(seed(), 200)
    assert x.shape == (200, 3, 4, 4)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (d.mean, d.std))
    torch.testing.assert_close(x, (d.x[y].float() - mean) / std, rtol=1e-5, atol=1e-5)
    assert len(set(y.tolist())) > 40  # with replacement, but everything comes


@pytest.mark.parametrize("name", ["images", "tokens", "rows", "teacher"])
def test_same_seed_same_batches_on_any_sequence_of_calls(name):
    rows = torch.randint(9, (30, 6), generator=seed(2))
    make = {
        "images": images,
        "tokens": lambda: data.Tokens(torch.arange(100), 100, 5),
        "rows": lambda: data.Tokens(rows, 9, 5),
        "teacher": data.Teacher,
    }[name]
    a, b, ga, gb = make(), make(), seed(3), seed(3)
    seen = []
    for size, particles in [(7, None), (5, 3), (1, None), (7, None)]:
        torch.rand(3)  # the global generator must not matter
        one, two = a.batch(ga, size, particles), b.batch(gb, size, particles)
        assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))
        assert one[0].shape == ((size,) if particles is None else (particles, size)) + a.shape
        seen.append(one[0])
    assert not torch.equal(seen[0], seen[3])
    assert not torch.equal(a.batch(seed(4), 7)[0], seen[0])


def test_particles_have_their_own_data():
    x, y = images().batch(seed(), 16, particles=4)
    assert x.shape == (4, 16, 3, 4, 4)
    assert y.shape == (4, 16)
    assert not torch.equal(x[0], x[1])
    flat, _ = images().batch(seed(), 64)
    assert torch.equal(x.flatten(0, 1), flat)


def test_what_does_not_fit_stays_and_batches_move(monkeypatch):
    monkeypatch.setattr(data, "_place", lambda x, device: x)
    d = images(device="meta")  # stands for a device that is too small
    assert d.x.device.type == "cpu"
    x, y = d.batch(seed(), 6, 2)
    assert x.device.type == y.device.type == "meta"
    assert x.shape == (2, 6, 3, 4, 4)
    t = data.Tokens(torch.arange(50), 50, 8, device="meta")
    assert t.data.device.type == "cpu"
    assert {v.device.type for v in t.batch(seed(), 3)} == {"meta"}


def test_pool_by_hand():
    x = torch.arange(16).view(1, 1, 4, 4).byte()
    x[0, 0, 0, 0] = 255
    d = data.Images(x, torch.zeros(1).long(), 10, [0.0], [1.0])
    # means of the 2x2 blocks: (255+1+4+5)/4 = 66.25, 4.5 (to even), 10.5 (to even), 12.5 (to even)
    assert d.pool(2).x.flatten().tolist() == [66, 4, 10, 12]
    assert d.pool(1).x.item() == round((255 + sum(range(1, 16))) / 16)
    assert d.pool(2).x.dtype == torch.uint8
    assert torch.equal(d.pool(4).x, x)
    # 4 -> 3: windows of adaptive pooling are [0, 2), [1, 3), [2, 4)
    rows = [(0, 2), (1, 3), (2, 4)]
    by_hand = [[x[0, 0, a:b, c:e].float().mean().round().item() for c, e in rows] for a, b in rows]
    assert d.pool(3).x[0, 0].tolist() == by_hand
    for size in (0, 5):
        with refused("cannot pool", f"size={size}"):
            d.pool(size)


def test_embedded_fashion(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # it does not depend on the current directory
    d = data.load()
    assert (len(d), d.shape, d.classes) == (10_000, (1, 28, 28), 10)
    assert d.y[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert torch.bincount(d.y).tolist() == [1000] * 10
    x, _ = d.batch(seed(), 10_000)
    assert abs(x.mean().item()) < 0.02
    assert abs(x.std().item() - 1) < 0.02
    p = data.load("fashion10k", size=14)
    assert p.shape == (1, 14, 14)
    full = d.x.view(-1, 14, 2, 14, 2).float().mean((2, 4)).round()
    assert torch.equal(p.x[:, 0], full.byte())
    assert data.load(size=8).batch(seed(), 5)[0].shape == (5, 1, 8, 8)
    with refused("fashion10k has no split 'test'", "use train"):
        data.load(split="test")
    assert "Zalando" in (data.EMBEDDED / "LICENSE").read_text()


# Fashion-MNIST: IDX


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    magic = 2048 + array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def fashion(root: Path, x: bytes, y: bytes, prefix: str = "train") -> None:
    put(root / f"fashion-mnist/{prefix}-images-idx3-ubyte.gz", x)
    put(root / f"fashion-mnist/{prefix}-labels-idx1-ubyte.gz", y)


X28 = np.arange(3 * 784).reshape(3, 28, 28).astype(np.uint8)
Y3 = np.array([9, 0, 4], np.uint8)


@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_fashion_layout(tmp_path, split, prefix):
    fashion(tmp_path, gzip.compress(idx(X28)), gzip.compress(idx(Y3)), prefix)
    d = data.load("fashion", tmp_path, split=split, check=False)
    assert np.array_equal(d.x[:, 0].numpy(), X28)
    assert d.y.tolist() == [9, 0, 4]
    with refused(f"{prefix}-images-idx3-ubyte.gz differs from the published file", "check=False"):
        data.load("fashion", tmp_path, split=split)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (gzip.compress(idx(X28, 2052)), Y3, ["train-images", "magic number 2052, not 2051"]),
        (gzip.compress(idx(X28)), X28, ["train-labels", "magic number 2051, not 2049"]),
        (gzip.compress(idx(X28)[:-1]), Y3, ["train-images", "[3, 28, 28] bytes it announces"]),
        (gzip.compress(idx(X28) + b"!"), Y3, ["train-images", "[3, 28, 28] bytes it announces"]),
        (gzip.compress(idx(X28))[:-9], Y3, ["train-images", "truncated or not gzip"]),
        (gzip.compress(idx(X28)[:9]), Y3, ["train-images", "truncated or not gzip"]),
        (idx(X28), Y3, ["train-images", "truncated or not gzip"]),
        (b"", Y3, ["train-images", "truncated or not gzip"]),
        (gzip.compress(struct.pack(">4I", 2051, *[2**32 - 1] * 3)), Y3, ["train-images"]),
        (gzip.compress(idx(X28[:, :27])), Y3, ["train-images", "not 3 images of 28x28"]),
        (gzip.compress(idx(X28[:2])), Y3, ["train-images", "not 3 images of 28x28"]),
        (gzip.compress(idx(X28)), Y3 + 1, ["train-labels", "labels out of range 0..9"]),
        (gzip.compress(idx(X28[:0])), Y3[:0], ["train-labels", "no labels"]),
    ],
)
def test_fashion_refuses(tmp_path, x, y, words):
    fashion(tmp_path, x, gzip.compress(idx(y)))
    with refused(*words):
        data.load("fashion", tmp_path, check=False)


def test_fashion_real():
    folder = real("fashion-mnist")
    d = data.load("fashion", folder.parent)
    assert (len(d), d.shape) == (60_000, (1, 28, 28))
    assert d.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert d.x.double().mean().item() == pytest.approx(d.mean[0], abs=1e-4)
    assert d.x.double().std().item() == pytest.approx(d.std[0], abs=1e-3)
    test, embedded = data.load("fashion", folder.parent, split="test"), data.load()
    assert torch.equal(test.x, embedded.x)
    assert torch.equal(test.y, embedded.y)


# CIFAR-10


def records(n: int, labels=None) -> bytes:
    r = np.random.default_rng(n).integers(0, 256, (n, 3073)).astype(np.uint8)
    r[:, 0] = np.arange(n) % 10 if labels is None else labels
    return r.tobytes()


def cifar(root: Path, *names: str, content: bytes | None = None) -> Path:
    folder = root / "cifar10/cifar-10-batches-bin"
    for k, name in enumerate(names):
        put(folder / name, records(k + 2) if content is None else content)
    return folder


ALL = [f"data_batch_{k}.bin" for k in range(1, 6)]


def test_cifar_binary_layout(tmp_path):
    cifar(tmp_path, *ALL, "test_batch.bin")
    d = data.load("cifar10", tmp_path, check=False)
    raw = np.frombuffer(b"".join(records(k) for k in range(2, 7)), np.uint8).reshape(-1, 3073)
    assert np.array_equal(d.x.numpy().reshape(-1, 3072), raw[:, 1:])
    assert np.array_equal(d.x[3, 1, 0, :5].numpy(), raw[3, 1 + 1024 : 1 + 1029])  # planar: G
    assert d.y.tolist() == raw[:, 0].tolist()
    assert (d.shape, d.classes) == ((3, 32, 32), 10)
    assert len(data.load("cifar10", tmp_path, split="test", check=False)) == 7
    assert data.load("cifar10", tmp_path, size=8, check=False).shape == (3, 8, 8)
    with refused("data_batch_1.bin differs from the published file"):
        data.load("cifar10", tmp_path)


def test_cifar_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        data.load("cifar10", tmp_path)
    message = str(error.value)
    assert all(
        name in message
        for name in [*ALL, "cifar-10-batches-bin", "python tasks.py download cifar10"]
    )
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in message
    cifar(tmp_path, "data_batch_1.bin", "data_batch_4.bin")
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2.bin, data_batch_3.bin, data_"):
        data.load("cifar10", tmp_path, check=False)
    assert len(data.load("cifar10", tmp_path, partial=True, check=False)) == 2 + 3
    with pytest.raises(FileNotFoundError, match="test_batch"):  # partial still wants one
        data.load("cifar10", tmp_path, split="test", partial=True, check=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (records(3)[:-1], ["9218 bytes, not records of 3073"]),
        (records(3, [1, 10, 2]), ["labels out of range 0..9"]),
        (b"", ["no labels"]),
    ],
)
def test_cifar_binary_refuses(tmp_path, content, words):
    cifar(tmp_path, "data_batch_1.bin", content=content)
    with refused("data_batch_1.bin", *words):
        data.load("cifar10", tmp_path, partial=True, check=False)


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


X4 = np.random.default_rng(0).integers(0, 256, (4, 3072)).astype(np.uint8)
NEVER = Path("the_pickle_ran")


def python_batches(root: Path, content: bytes) -> None:
    put(root / "cifar10/cifar-10-batches-py/data_batch_1", content)


@pytest.mark.parametrize("writer", ["python 2", "python 3", "fortran"])
def test_cifar_python_layout(tmp_path, writer):
    y = [3, 9, 0, 1]
    if writer == "python 2":
        content = python2_pickle(X4, y)
        assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"], X4)
    else:
        x = np.asfortranarray(X4) if writer == "fortran" else X4
        content = pickle.dumps({"data": x, "labels": y, "filenames": ["a"]}, protocol=2)
    python_batches(tmp_path, content)
    d = data.load("cifar10", tmp_path, partial=True, check=False)
    assert np.array_equal(d.x.numpy().reshape(4, -1), X4)
    assert d.y.tolist() == y
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py lacks data_batch_2, data_b"):
        data.load("cifar10", tmp_path)


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(Evil(os.system, f"touch {NEVER}")), ["system", "it may run code"]),
        (pickle.dumps({"data": X4, "labels": Evil(eval, "1")}, 2), ["eval", "it may run code"]),
        (pickle.dumps({"data": Evil(NEVER.touch), "labels": [1]}, 2), ["it may run code"]),
        (b"cnumpy.testing\nmeasure\n(Vopen('x')\ntR.", ["numpy.testing.measure", "may run code"]),
        (b"cnumpy.core.multiarray\nfromfile\n.", ["fromfile", "it may run code"]),
        (b"cnumpy\nndarray\n}b.", ["not a CIFAR-10 batch"]),
        (pickle.dumps({"data": X4, "labels": [1, 2, 3, 10]}, 2), ["out of range 0..9"]),
        (pickle.dumps({"data": X4, "labels": [1, 2, 3, 0.5]}, 2), ["out of range 0..9"]),
        (pickle.dumps({"data": X4, "labels": [1, 2, 3]}, 2), ["(4, 3072) for 3 labels"]),
        (pickle.dumps({"data": X4[:, :9], "labels": [1] * 4}, 2), ["(4, 9) for 4 labels"]),
        (pickle.dumps({"data": X4.astype(int), "labels": [1] * 4}, 2), ["not a CIFAR-10 batch"]),
        (pickle.dumps({"data": X4.astype(object), "labels": [1]}, 2), ["not a CIFAR-10 batch"]),
        (pickle.dumps({"labels": [1]}, 2), ["not a CIFAR-10 batch"]),
        (pickle.dumps([1, 2], 2), ["not a CIFAR-10 batch"]),
        (python2_pickle(X4, [1] * 4)[:-40], ["not a CIFAR-10 batch"]),
        (b"", ["not a CIFAR-10 batch"]),
    ],
)
def test_cifar_python_refuses(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    python_batches(tmp_path, content)
    with refused("data_batch_1", *words):
        data.load("cifar10", tmp_path, partial=True)
    assert not NEVER.exists()


def test_cifar_real():
    folder = real("cifar10")
    d = data.load("cifar10", folder.parent, partial=True)
    test = data.load("cifar10", folder.parent, split="test")
    assert len(d) >= 10_000
    assert len(test) == 10_000
    assert d.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert test.y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    x, _ = d.batch(seed(), 2000)
    assert x.mean((0, 2, 3)).abs().max() < 0.05
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.05


# ImageNet


def imagenet(root: Path, side: int = 32, batches=range(1, 11), **change) -> list[dict]:
    folder = root / f"imagenet{side}"
    folder.mkdir(exist_ok=True, parents=True)
    r, made = np.random.default_rng(0), []
    for k in batches:
        x = r.integers(0, 256, (k, 3 * side**2)).astype(np.uint8)
        arrays = {"data": x, "labels": r.integers(1, 1001, k), "mean": x.mean(0)}
        arrays |= change if k == 10 else {}
        name = "val_data.npz" if k == 0 else f"train_data_batch_{k}.npz"
        np.savez(folder / name, **{n: v for n, v in arrays.items() if v is not None})
        made.append(arrays)
    return made


@pytest.mark.parametrize("side", [32, 64])
def test_imagenet_layout(tmp_path, side):
    made = imagenet(tmp_path, side)
    d = data.load(f"imagenet{side}", tmp_path)
    assert (len(d), d.shape, d.classes) == (55, (3, side, side), 1000)
    x = np.concatenate([m["data"] for m in made])
    y = np.concatenate([m["labels"] for m in made])
    assert np.array_equal(d.x.numpy().reshape(55, -1), x)
    assert np.array_equal(d.y.numpy(), y - 1)
    folder = tmp_path / f"imagenet{side}"
    for path in folder.glob("*.npz"):
        path.unlink()  # converted once: the .npz are no longer needed
    again = data.load(f"imagenet{side}", tmp_path)
    a, b = d.batch(seed(), 9), again.batch(seed(), 9)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert sorted(p.name for p in folder.iterdir()) == ["train_x.npy", "train_y.npy"]
    with pytest.raises(FileNotFoundError, match=r"lacks val_data.npz: .*image-net.org"):
        data.load(f"imagenet{side}", tmp_path, split="val")


def test_imagenet_is_mapped_not_read(tmp_path):
    imagenet(tmp_path)
    data.load("imagenet32", tmp_path)
    path = tmp_path / "imagenet32/train_x.npy"
    d = data.load("imagenet32", tmp_path)
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read()[0]
        file.seek(-1, 2)
        file.write(bytes([255 - last]))
    assert d.x[-1, -1, -1, -1] == 255 - last  # seen through the map
    d.x[0] = 7  # and what is written to the map does not reach the file
    assert (data.load("imagenet32", tmp_path).x[0] != 7).any()
    path.write_bytes(path.read_bytes()[:-1000])
    del d
    with refused("train_x.npy is damaged", "delete it"):
        data.load("imagenet32", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": np.arange(10)}, ["labels out of range 1..1000"]),
        ({"labels": np.arange(992, 1002)}, ["labels out of range 1..1000"]),
        ({"labels": np.ones(9, int)}, ["(10, 3072) for 9 labels"]),
        ({"labels": np.ones(10)}, ["labels out of range"]),
        ({"data": np.zeros((10, 12288), np.uint8)}, ["(10, 12288) for 10 labels"]),
        ({"data": np.zeros((10, 3072))}, ["float64 data"]),
        ({"data": np.array([NEVER] * 10, object)}, ["no readable array 'data'"]),
        ({"data": None}, ["no readable array 'data'"]),
    ],
)
def test_imagenet_refuses_and_leaves_no_images_behind(tmp_path, change, words):
    imagenet(tmp_path, **change)
    with refused("train_data_batch_10.npz", *words):
        data.load("imagenet32", tmp_path)
    assert not list((tmp_path / "imagenet32").glob("*train_x*"))


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"data": 1}), None])
def test_imagenet_refuses_what_is_no_npz(tmp_path, content):
    imagenet(tmp_path)
    path = tmp_path / "imagenet32/train_data_batch_3.npz"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with refused("train_data_batch_3.npz has no readable array"):
        data.load("imagenet32", tmp_path)


def test_imagenet_missing_batch(tmp_path):
    imagenet(tmp_path, batches=[1, 2, 4])
    with pytest.raises(FileNotFoundError, match=r"lacks train_data_batch_3.npz, train_.*_5"):
        data.load("imagenet32", tmp_path)


# Text


def test_tokens_are_shifted_windows():
    text = torch.arange(20)
    d = data.Tokens(text, 20, 6)
    assert len(d) == 14
    tokens, targets, mask = d.batch(seed(), 500)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert mask.dtype == torch.bool
    assert mask.all()
    assert (tokens[:, 0].min(), targets[:, -1].max()) == (0, 19)  # both ends can be reached
    with refused("6 tokens", "seq_len=6"):
        data.Tokens(torch.arange(6), 20, 6)
    with refused("5 tokens", "seq_len=3"):
        data.Tokens(torch.zeros(2, 5).int(), 20, 3)


def test_mask_is_false_where_the_target_is_padding():
    rows = torch.tensor([[5, 0, 7, -1, -1], [1, -1, -1, -1, -1], [1, 2, 3, 4, 5]])
    tokens, targets, mask = data.Tokens(rows, 8, 4).batch(seed(), 100)
    expected = {
        5: ([5, 0, 7, 0], [0, 7, 0, 0], [True, True, False, False]),  # its 0 is a token
        1: ([1, 0, 0, 0], [0, 0, 0, 0], [False] * 4),
        2: ([1, 2, 3, 4], [2, 3, 4, 5], [True] * 4),
    }
    seen = set()
    for row in zip(tokens.tolist(), targets.tolist(), mask.tolist(), strict=True):
        key = 2 if row[0][1] == 2 else row[0][0]
        assert row == expected[key]
        seen.add(key)
    assert seen == {1, 2, 5}
    assert tokens.dtype == targets.dtype == torch.int64


def test_text_as_bytes(tmp_path):
    content = "Größe, 大きさ. ".encode() * 20
    path = put(tmp_path / "some.txt", content)
    d = data.load(f"text:{path}", seq_len=16)
    assert d.classes == 256
    tokens, targets, mask = d.batch(seed(), 4, particles=3)
    assert tokens.shape == (3, 4, 16)
    assert mask.all()
    for a, b in zip(tokens.view(-1, 16), targets.view(-1, 16), strict=True):
        assert bytes([*a.tolist(), b[-1].item()]) in content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Größe".encode("latin1") * 99, ["some.txt is not UTF-8 text (byte 2)"]),
        (b"short", ["5 tokens", "seq_len=64"]),
        (b"", ["some.txt is empty"]),
    ],
)
def test_text_refuses(tmp_path, content, words):
    path = put(tmp_path / "some.txt", content)
    with refused(*words):
        data.load(f"text:{path}")
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing.txt"):
        data.load(f"text:{tmp_path / 'nothing.txt'}")


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("tinyshakespeare/input.txt", "86c4e6aa9db7c042ec79f339dcb96d42"),
        ("wikitext-2-valid-test/valid.txt", "f0737ed31fc1329026e95cb8b98e19c2"),
    ],
)
def test_text_real(name, sha256):
    path = real(Path(name).parent.name) / Path(name).name
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest().startswith(sha256)
    d = data.load(f"text:{path}", seq_len=32)
    assert len(d) == len(content) - 32
    tokens, targets, _ = d.batch(seed(), 8)
    assert bytes([*tokens[0].tolist(), targets[0, -1].item()]) in content


def by_letter(sentence: str) -> list[int]:
    return [ord(c) for c in sentence]


def lm1b(root: Path, *texts: str, split: str = "train") -> None:
    names = {"train": ("training", "news.en-{:05}-of-00100", 1)}
    names["heldout"] = ("heldout", "news.en.heldout-{:05}-of-00050", 0)
    folder, name, first = names[split]
    for k, text in enumerate(texts):
        path = root / TEXTS / f"{folder}-monolingual.tokenized.shuffled" / name.format(first + k)
        put(path, text.encode())


def load_lm1b(root: Path, **kwargs) -> data.Tokens:
    kwargs = {"tokenizer": by_letter, "partial": True, "check": False} | kwargs
    return data.load("lm1b", root, **kwargs)


def test_lm1b_rows_are_sentences_cropped_or_padded(tmp_path):
    lm1b(tmp_path, "abc\nabcdefgh\n\n", "x\nab\u2028d\r")  # only \n ends a sentence
    d = load_lm1b(tmp_path, seq_len=4)
    rows = [[97, 98, 99, -1, -1], [97, 98, 99, 100, 101], [120, -1, -1, -1, -1]]
    assert len(d) == 4
    assert d.data[:3].tolist() == rows
    assert d.data[3].tolist() == [97, 98, 0x2028, 100, 13]
    assert d.classes == 32_000
    tokens, targets, mask = d.batch(seed(), 50)
    assert tokens.shape == targets.shape == mask.shape == (50, 4)
    assert set(mask.sum(1).tolist()) == {0, 2, 4}
    for ids in ([32_000], [-1]):
        with refused("news.en-00001-of-00100 got token ids beyond 31999"):
            load_lm1b(tmp_path, tokenizer=lambda _, ids=ids: ids)


def test_lm1b_splits_and_missing_files(tmp_path):
    lm1b(tmp_path, "train\n")
    lm1b(tmp_path, "held\n", "out\n", split="heldout")
    assert len(load_lm1b(tmp_path)) == 1
    assert len(load_lm1b(tmp_path, split="heldout")) == 2
    lacks = r"lacks news.en-00002-of-00100 to news.en-00099-of-00100: unpack https://www.statmt"
    with pytest.raises(FileNotFoundError, match=lacks):
        load_lm1b(tmp_path, partial=False)
    with pytest.raises(FileNotFoundError, match=r"heldout-00002-of-00050 to .*-00049-of-00050"):
        load_lm1b(tmp_path, partial=False, split="heldout")
    with refused("heldout-00000-of-00050 differs from the published file"):
        load_lm1b(tmp_path, check=True, split="heldout")
    path = next(tmp_path.rglob("news.en-00001-of-00100"))
    for content, words in [(b"\xff\xfe", "not UTF-8 text (byte 0)"), (b"", "is empty")]:
        path.write_bytes(content)
        with refused(path.name, words):
            load_lm1b(tmp_path)


def test_lm1b_without_sentencepiece(tmp_path, monkeypatch):
    lm1b(tmp_path, "a b\n")
    with pytest.raises(FileNotFoundError, match=r"0 files \*.model: put one .*tokenizer="):
        load_lm1b(tmp_path, tokenizer=None)
    put(tmp_path / "lm1b/some.model", b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install sentencepiece.*tokenizer="):
        load_lm1b(tmp_path, tokenizer=None)


class FakeProcessor:
    """sentencepiece.SentencePieceProcessor, as far as it is used here."""

    calls = 0

    def __init__(self, model_proto: bytes):
        if model_proto == b"junk":
            raise RuntimeError("parse error")
        self.add = model_proto[0]

    def vocab_size(self) -> int:
        return 200

    def encode(self, sentence: str) -> list[int]:
        FakeProcessor.calls += 1
        return [ord(c) + self.add for c in sentence]


def test_lm1b_is_tokenized_once(tmp_path, monkeypatch):
    module = type(sys)("sentencepiece")
    module.SentencePieceProcessor = FakeProcessor
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    monkeypatch.setattr(FakeProcessor, "calls", 0)
    lm1b(tmp_path, "abc\nab\n")
    model = put(tmp_path / "lm1b/some.model", b"\x01")
    for _ in range(2):
        d = load_lm1b(tmp_path, tokenizer=None, seq_len=2)
        assert d.data.tolist() == [[98, 99, 100], [98, 99, -1]]
        assert d.classes == 200
        assert FakeProcessor.calls == 2
    assert load_lm1b(tmp_path, tokenizer=None, seq_len=1).data.tolist() == [[98, 99], [98, 99]]
    model.write_bytes(b"\x02")  # another model: nothing stale is read
    assert load_lm1b(tmp_path, tokenizer=None, seq_len=1).data.tolist() == [[99, 100], [99, 100]]
    lm1b(tmp_path, "abcd\nab\n")
    assert load_lm1b(tmp_path, tokenizer=None, seq_len=3).data[0].tolist() == [99, 100, 101, 102]
    model.write_bytes(b"junk")
    with refused("some.model is not a sentencepiece model"):
        load_lm1b(tmp_path, tokenizer=None)


def test_lm1b_with_a_real_sentencepiece_model(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    text = "\n".join(f"the {a} sees the {b} ." for a in ("cat", "dog") for b in ("bird", "tree"))
    lm1b(tmp_path, text)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    put(tmp_path / "lm1b/toy.model", model.getvalue())
    d = load_lm1b(tmp_path, tokenizer=None, seq_len=40)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert d.classes == sp.vocab_size()
    for row, sentence in zip(d.data.tolist(), text.split("\n"), strict=True):
        assert sp.decode([i for i in row if i >= 0]) == sentence


def test_lm1b_real(tmp_path):
    (tmp_path / "lm1b").symlink_to(real("lm1b-heldout"))
    d = load_lm1b(tmp_path, split="heldout", check=True, tokenizer=lambda s: s.encode(), seq_len=48)
    assert len(d) == 6075
    assert (
        bytes(d.data[0].tolist())
        == b"Having a little flexibility on that issue would go a long"[:49]
    )


# The teacher


def test_teacher_spectrum():
    t = data.Teacher(dim=16, alpha=1.0)
    x, _ = t.batch(seed(), 200_000)
    std = x.std(0)
    torch.testing.assert_close(std / std[0], 1 / torch.arange(1.0, 17), rtol=0.02, atol=0)
    assert x.square().mean().item() == pytest.approx(1, rel=0.01)
    assert (torch.corrcoef(x.T) - torch.eye(16)).abs().max() < 0.02
    assert x.mean(0).abs().max() < 0.02


def test_teacher_labels_follow_its_softmax():
    t = data.Teacher(classes=5)
    x, y = t.batch(seed(), 100_000)
    log_p = t.log_probs(x)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(len(x)))
    # whatever p says of a class, it happens that often: overall, and among inputs of like p
    frequency = torch.bincount(y, minlength=5) / len(y)
    torch.testing.assert_close(frequency, log_p.exp().mean(0), rtol=0, atol=0.006)
    p0 = log_p[:, 0].exp()
    for low, high in [(0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1)]:
        among = (p0 > low) & (p0 <= high)
        assert among.sum() > 1000
        assert (y[among] == 0).float().mean().item() == pytest.approx(
            p0[among].mean().item(), abs=0.03
        )
    # so the teacher's own loss on its labels is the floor, which is above 0 and below chance
    loss = torch.nn.functional.nll_loss(log_p, y).item()
    assert loss == pytest.approx(t.floor(), abs=0.015)
    assert 0.2 < t.floor(10_000) < math.log(5) - 0.2


def test_teacher_is_made_by_its_seed_and_temperature():
    x = torch.randn(3, 64, generator=seed())
    a, b = data.Teacher(seed=1), data.load("teacher")
    assert torch.equal(a.log_probs(x), data.Teacher(seed=1).log_probs(x))
    assert not torch.equal(a.log_probs(x), b.log_probs(x))
    assert (b.dim, b.classes, b.shape) == (64, 10, (64,))
    cold, flat = data.Teacher(temperature=50.0), data.Teacher(temperature=0.0)
    assert cold.floor(5000) < b.floor(5000) < flat.floor(5000)
    assert flat.floor(100) == pytest.approx(math.log(10), rel=1e-5)
    first, second = b.batch(g := seed(), 8)[0], b.batch(g, 8)[0]
    assert not torch.equal(first, second)  # never the same examples


# Names and folders


def test_names_splits_and_folders(tmp_path, monkeypatch):
    with refused("unknown data set 'cifar': did you mean 'cifar10'?", "text:<path>"):
        data.load("cifar")
    for name in ("text", "text:", "cifar10:x"):
        with refused(f"unknown data set {name!r}"):
            data.load(name)
    with refused("cifar10 has no split 'val': use train or test"):
        data.load("cifar10", split="val")
    with refused("size=8 is for images and teacher has none"):
        data.load("teacher", size=8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULO_DATA", raising=False)
    cifar(tmp_path / "data", *ALL)
    cifar(tmp_path / "other", "data_batch_1.bin")
    assert len(data.load("cifar10", check=False)) == 20  # ./data
    monkeypatch.setenv("MULO_DATA", str(tmp_path / "other"))
    assert len(data.load("cifar10", partial=True, check=False)) == 2
    assert len(data.load("cifar10", tmp_path / "data", check=False)) == 20  # the argument wins


# Downloads


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


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    s = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files, s.requests, s.ranges, s.breaks_at = {}, [], True, None
    s.url = f"http://127.0.0.1:{s.server_port}"
    thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield s
    s.shutdown()
    thread.join()
    s.server_close()


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


TAR = "cifar-10-binary.tar.gz"


@pytest.fixture
def archive(server, monkeypatch) -> bytes:
    content = tar({f"cifar-10-batches-bin/{name}": records(2) for name in ALL})
    server.files[TAR] = content
    monkeypatch.setitem(datafiles.MD5, TAR, hashlib.md5(content).hexdigest())
    return content


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_and_load(server, archive, tmp_path):
    datafiles.download("cifar10", tmp_path, server.url)
    assert len(data.load("cifar10", tmp_path, check=False)) == 10
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]
    datafiles.download("cifar10", tmp_path, server.url)
    assert server.requests == [(TAR, None)]  # it was there and right


def test_download_resumes(server, archive, tmp_path):
    server.breaks_at = 5000
    with pytest.raises(OSError, match=rf"stopped after 5000 of {len(archive)} bytes.*goes on"):
        datafiles.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == [f"{TAR}.part"]
    server.breaks_at = None
    datafiles.download("cifar10", tmp_path, server.url)
    assert server.requests == [(TAR, None), (TAR, "bytes=5000-")]
    assert (tmp_path / "cifar10" / TAR).read_bytes() == archive
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]


def test_download_restarts_when_range_is_ignored(server, archive, tmp_path):
    put(tmp_path / "cifar10" / f"{TAR}.part", b"the beginning of something else")
    server.ranges = False
    datafiles.download("cifar10", tmp_path, server.url)
    assert server.requests[0][1] == "bytes=31-"
    assert (tmp_path / "cifar10" / TAR).read_bytes() == archive


def test_download_of_a_part_that_is_whole(server, archive, tmp_path):
    put(tmp_path / "cifar10" / f"{TAR}.part", archive)
    datafiles.download("cifar10", tmp_path, server.url)  # the server answers 416
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]


def test_download_checks_before_it_renames(server, archive, tmp_path):
    server.files[TAR] = archive[:-1] + b"!"
    with refused(f"{TAR} came with the wrong checksum", "it was deleted"):
        datafiles.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == []
    put(tmp_path / "cifar10" / f"{TAR}.part", b"a bad beginning")
    server.files[TAR] = archive
    with refused("wrong checksum"):  # resumed onto the wrong bytes
        datafiles.download("cifar10", tmp_path, server.url)
    datafiles.download("cifar10", tmp_path, server.url)  # and the next one starts clean


def test_download_of_several_files(server, tmp_path, monkeypatch):
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", X28), ("labels-idx1", Y3)):
            name = f"{prefix}-{kind}-ubyte.gz"
            server.files[name] = gzip.compress(idx(array))
            monkeypatch.setitem(datafiles.MD5, name, hashlib.md5(server.files[name]).hexdigest())
    datafiles.download("fashion", tmp_path, server.url)
    assert len(data.load("fashion", tmp_path, check=False)) == 3
    assert len(data.load("fashion", tmp_path, split="test", check=False)) == 3
    put(tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte.gz", b"damaged")
    datafiles.download("fashion", tmp_path, server.url)
    assert len(server.requests) == 5  # only the damaged one again


def test_download_tells_what_is_wrong(server, tmp_path):
    with pytest.raises(OSError, match=r"cifar-10-binary.tar.gz: HTTP Error 404"):
        datafiles.download("cifar10", tmp_path, server.url)
    with pytest.raises(OSError, match=r"python.tar.gz: .*refused"):
        datafiles.download("cifar10-python", tmp_path, "http://127.0.0.1:9")
    for name, where in [("imagenet32", "image-net.org"), ("lm1b", "www.statmt.org")]:
        with refused(f"{name!r} is not for download: unpack", where):
            datafiles.download(name, tmp_path)
    with refused("'cifar' is not for download: there are cifar10, cifar10-python, fashion"):
        datafiles.download("cifar", tmp_path)


def test_command_line(tmp_path):
    tasks = Path(data.__file__).with_name("tasks.py")
    command = [sys.executable, tasks, "download", "imagenet32", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("https://image-net.org/download-images there.")
    assert "Traceback" not in done.stderr


def test_unpacking_stays_in_its_folder(server, tmp_path, monkeypatch):
    server.files[TAR] = tar({"fine.bin": b"fine", "../../outside": b"evil"})
    monkeypatch.setitem(datafiles.MD5, TAR, hashlib.md5(server.files[TAR]).hexdigest())
    with refused(f"{TAR} was not unpacked"):
        datafiles.download("cifar10", tmp_path / "root", server.url)
    assert not list(tmp_path.rglob("outside"))
    assert names(tmp_path / "root/cifar10") == [TAR]


def test_cut_cifar_batches_are_refused(tmp_path):
    """Cut between records: the size is a multiple of a record's, but not 10,000 of them."""
    folder = tmp_path / "cifar10/cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in ALL:
        (folder / name).write_bytes(bytes(3073 * 7))
    with refused("data_batch_1.bin", "differs from the published file"):
        data.load("cifar10", tmp_path)
    assert len(data.load("cifar10", tmp_path, check=False)) == 35
    path = tmp_path / "cifar10/cifar-10-batches-py/data_batch_1"
    folder.rename(tmp_path / "away")
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({"data": np.zeros((4, 3072), np.uint8), "labels": [0] * 4}, 2))
    with refused("data_batch_1 has 4 records, not 10000"):
        data.load("cifar10", tmp_path, partial=True)


@pytest.mark.parametrize("bad", [b"", b"junk", bytes(200)])
def test_damaged_conversions_are_refused(tmp_path, bad):
    """What was once converted is checked as the published files are."""
    folder = tmp_path / "imagenet32"
    folder.mkdir()
    np.save(folder / "val_x.npy", np.zeros((2, 3, 32, 32), np.uint8))
    np.save(folder / "val_y.npy", np.array([5, 999]))
    assert len(data.load("imagenet32", tmp_path, split="val")) == 2
    for y in (np.array([5000, -3]), np.array([0.5, 1.0]), np.zeros((2, 2), int), np.array(3)):
        np.save(folder / "val_y.npy", y)
        with refused("val_y.npy is damaged", "delete it"):
            data.load("imagenet32", tmp_path, split="val")
    np.save(folder / "val_y.npy", np.array([5, 999]))
    (folder / "val_x.npy").write_bytes(bad)
    with refused("val_x.npy is damaged", "delete it"):
        data.load("imagenet32", tmp_path, split="val")


@pytest.mark.parametrize("member", [b"not an array", b""])
def test_npz_members_that_are_no_arrays(tmp_path, member):
    folder = tmp_path / "imagenet32"
    folder.mkdir()
    with zipfile.ZipFile(folder / "val_data.npz", "w") as z:
        z.writestr("labels.npy", member)
        z.writestr("data.npy", member)
    with refused("val_data.npz"):
        data.load("imagenet32", tmp_path, split="val")


def test_giant_idx_is_refused(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    head = struct.pack(">4I", 2051, 2**20, 1024, 1024)
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (folder / name).write_bytes(gzip.compress(head))
    with refused("train-images-idx3-ubyte.gz"):
        data.load("fashion", tmp_path)


def test_memory_is_used_again_only_when_nobody_holds_it():
    """Batches that live, or whose views or graphs do, keep their values."""
    d = images(50)
    held = [d.batch(seed(), 6)[0] for _ in range(5)]
    copies = [x.clone() for x in held]
    views, graphs = d.batch(seed(), 6)[0][2:, :, 1], d.batch(seed(), 6)[0]
    w = torch.ones(4, requires_grad=True)
    loss = (graphs * w).sum()
    expected_view, expected_grad = views.clone(), graphs.sum((0, 1, 2))
    del graphs
    generator = torch.Generator().manual_seed(9)
    places = set()
    for _ in range(30):
        x, _ = d.batch(generator, 6)
        places.add(x.data_ptr())
    assert len(places) <= 3
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    assert torch.equal(views, expected_view)
    loss.backward()
    torch.testing.assert_close(w.grad, expected_grad)


def test_published_checksums():
    assert datafiles.MD5["cifar-10-binary.tar.gz"] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert datafiles.MD5["cifar-10-python.tar.gz"] == "c58f30108f718f92721af3b95e74349a"
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in datafiles.SHA256.values())
    assert {file for _, _, files in datafiles.DOWNLOADS.values() for file in files} == set(
        datafiles.MD5
    )
