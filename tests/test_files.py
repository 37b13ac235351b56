"""Readers of images: small files in the published layout, hostile ones, and real ones."""

import gzip
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import ALL, X28, Y3, cifar, idx, put, real, records, refused, seed

from optimizees import datasets

# Fashion-MNIST: IDX


def fashion(root: Path, x: bytes, y: bytes, prefix: str = "train") -> None:
    put(root / f"fashion-mnist/{prefix}-images-idx3-ubyte.gz", x)
    put(root / f"fashion-mnist/{prefix}-labels-idx1-ubyte.gz", y)


@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_fashion_layout(tmp_path, split, prefix):
    fashion(tmp_path, gzip.compress(idx(X28)), gzip.compress(idx(Y3)), prefix)
    d = datasets.load("fashion", tmp_path, split=split, check=False)
    assert np.array_equal(d.x[:, 0].numpy(), X28)
    assert d.y.tolist() == [9, 0, 4]
    with refused(f"{prefix}-images-idx3-ubyte.gz differs from the published file", "check=False"):
        datasets.load("fashion", tmp_path, split=split)


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
        (gzip.compress(struct.pack(">4I", 2051, 2**20, 1024, 1024)), Y3, ["train-images"]),
        (gzip.compress(idx(X28[:, :27])), Y3, ["train-images", "not 3 images of 28x28"]),
        (gzip.compress(idx(X28[:2])), Y3, ["train-images", "not 3 images of 28x28"]),
        (gzip.compress(idx(X28)), Y3 + 1, ["train-labels", "labels out of range 0..9"]),
        (gzip.compress(idx(X28[:0])), Y3[:0], ["train-labels", "no labels"]),
    ],
)
def test_fashion_refuses(tmp_path, x, y, words):
    fashion(tmp_path, x, gzip.compress(idx(y)))
    with refused(*words):
        datasets.load("fashion", tmp_path, check=False)


def test_fashion_real():
    folder = real("fashion-mnist")
    d = datasets.load("fashion", folder.parent)
    assert (len(d), d.shape) == (60_000, (1, 28, 28))
    assert d.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    assert d.x.double().mean().item() == pytest.approx(d.mean[0], abs=1e-4)
    assert d.x.double().std().item() == pytest.approx(d.std[0], abs=1e-3)
    test, embedded = datasets.load("fashion", folder.parent, split="test"), datasets.load()
    assert torch.equal(test.x, embedded.x)
    assert torch.equal(test.y, embedded.y)


# CIFAR-10


def test_cifar_binary_layout(tmp_path):
    cifar(tmp_path, *ALL, "test_batch.bin")
    d = datasets.load("cifar10", tmp_path, check=False)
    raw = np.frombuffer(b"".join(records(k) for k in range(2, 7)), np.uint8).reshape(-1, 3073)
    assert np.array_equal(d.x.numpy().reshape(-1, 3072), raw[:, 1:])
    assert np.array_equal(d.x[3, 1, 0, :5].numpy(), raw[3, 1 + 1024 : 1 + 1029])  # planar: G
    assert d.y.tolist() == raw[:, 0].tolist()
    assert (d.shape, d.classes) == ((3, 32, 32), 10)
    assert len(datasets.load("cifar10", tmp_path, split="test", check=False)) == 7
    assert datasets.load("cifar10", tmp_path, size=8, check=False).shape == (3, 8, 8)
    with refused("data_batch_1.bin differs from the published file"):
        datasets.load("cifar10", tmp_path)


def test_cifar_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("cifar10", tmp_path)
    message = str(error.value)
    assert all(
        name in message
        for name in [*ALL, "cifar-10-batches-bin", "python tasks.py download cifar10"]
    )
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in message
    cifar(tmp_path, "data_batch_1.bin", "data_batch_4.bin")
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2.bin, data_batch_3.bin, data_"):
        datasets.load("cifar10", tmp_path, check=False)
    assert len(datasets.load("cifar10", tmp_path, partial=True, check=False)) == 2 + 3
    with pytest.raises(FileNotFoundError, match="test_batch"):  # partial still wants one
        datasets.load("cifar10", tmp_path, split="test", partial=True, check=False)


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
        datasets.load("cifar10", tmp_path, partial=True, check=False)


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
    d = datasets.load("cifar10", tmp_path, partial=True, check=False)
    assert np.array_equal(d.x.numpy().reshape(4, -1), X4)
    assert d.y.tolist() == y
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py lacks data_batch_2, data_b"):
        datasets.load("cifar10", tmp_path)


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
        (pickle.dumps({"data": X4, "labels": [1] * 4}, 2), ["has 4 records, not 10000"]),
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
        datasets.load("cifar10", tmp_path, partial=True)
    assert not NEVER.exists()


def test_cifar_real():
    folder = real("cifar10")
    d = datasets.load("cifar10", folder.parent, partial=True)
    test = datasets.load("cifar10", folder.parent, split="test")
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
    d = datasets.load(f"imagenet{side}", tmp_path)
    assert (len(d), d.shape, d.classes) == (55, (3, side, side), 1000)
    x = np.concatenate([m["data"] for m in made])
    y = np.concatenate([m["labels"] for m in made])
    assert np.array_equal(d.x.numpy().reshape(55, -1), x)
    assert np.array_equal(d.y.numpy(), y - 1)
    folder = tmp_path / f"imagenet{side}"
    for path in folder.glob("*.npz"):
        path.unlink()  # converted once: the .npz are no longer needed
    again = datasets.load(f"imagenet{side}", tmp_path)
    a, b = d.batch(seed(), 9), again.batch(seed(), 9)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert sorted(p.name for p in folder.iterdir()) == ["train_x.npy", "train_y.npy"]
    with pytest.raises(FileNotFoundError, match=r"lacks val_data.npz: .*image-net.org"):
        datasets.load(f"imagenet{side}", tmp_path, split="val")


def test_imagenet_is_mapped_not_read(tmp_path):
    imagenet(tmp_path)
    datasets.load("imagenet32", tmp_path)
    path = tmp_path / "imagenet32/train_x.npy"
    d = datasets.load("imagenet32", tmp_path)
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        last = file.read()[0]
        file.seek(-1, 2)
        file.write(bytes([255 - last]))
    assert d.x[-1, -1, -1, -1] == 255 - last  # seen through the map
    d.x[0] = 7  # and what is written to the map does not reach the file
    assert (datasets.load("imagenet32", tmp_path).x[0] != 7).any()
    path.write_bytes(path.read_bytes()[:-1000])
    del d
    with refused("train_x.npy is damaged", "delete train_x.npy and train_y.npy, so"):
        datasets.load("imagenet32", tmp_path)


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
        datasets.load("imagenet32", tmp_path)
    assert not list((tmp_path / "imagenet32").glob("*train_x*"))


def members(content: bytes) -> bytes:
    """An .npz whose arrays are none."""
    with zipfile.ZipFile(out := io.BytesIO(), "w") as z:
        z.writestr("labels.npy", content)
        z.writestr("data.npy", content)
    return out.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", pickle.dumps({"data": 1}), members(b"not an array"), members(b""), None],
)
def test_imagenet_refuses_what_is_no_npz(tmp_path, content):
    imagenet(tmp_path)
    path = tmp_path / "imagenet32/train_data_batch_3.npz"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with refused("train_data_batch_3.npz has no"):
        datasets.load("imagenet32", tmp_path)


def test_imagenet_missing_batch(tmp_path):
    imagenet(tmp_path, batches=[1, 2, 4])
    with pytest.raises(FileNotFoundError, match=r"lacks train_data_batch_3.npz, train_.*_5"):
        datasets.load("imagenet32", tmp_path)


@pytest.mark.parametrize("bad", [b"", b"junk", bytes(200)])
def test_damaged_conversions_are_refused(tmp_path, bad):
    """What was once converted is checked as the published files are."""
    folder = tmp_path / "imagenet32"
    folder.mkdir()
    np.save(folder / "val_x.npy", np.zeros((2, 3, 32, 32), np.uint8))
    np.save(folder / "val_y.npy", np.array([5, 999]))
    assert len(datasets.load("imagenet32", tmp_path, split="val")) == 2
    for y in (np.array([5000, -3]), np.array([0.5, 1.0]), np.zeros((2, 2), int), np.array(3)):
        np.save(folder / "val_y.npy", y)
        with refused("val_y.npy has no labels, or labels out of range 0..999: delete val_x.npy"):
            datasets.load("imagenet32", tmp_path, split="val")
    np.save(folder / "val_y.npy", np.array([5, 999, 3]))
    with refused("val_x.npy is uint8 (2, 3, 32, 32) for 3 labels: delete val_x.npy and val_y.npy"):
        datasets.load("imagenet32", tmp_path, split="val")
    (folder / "val_y.npy").write_bytes(bad)
    with refused("val_y.npy is damaged", "delete val_x.npy and val_y.npy"):
        datasets.load("imagenet32", tmp_path, split="val")
    np.save(folder / "val_y.npy", np.array([5, 999]))
    (folder / "val_x.npy").write_bytes(bad)
    with refused("val_x.npy is damaged", "delete val_x.npy and val_y.npy"):
        datasets.load("imagenet32", tmp_path, split="val")
