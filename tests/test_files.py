"""Readers and downloads: published layouts in small, damaged and hostile files, the real files."""

import gzip
import hashlib
import pickle
import sys
import threading
from http.server import ThreadingHTTPServer

import numpy as np
import pytest
import torch
from data_files import (
    TRAINING,
    FakeProcessor,
    Handler,
    imagenet,
    lm1b,
    publish,
    published,
    put,
    records,
    refused,
    seed,
    tar,
)

from mulo import tasks
from mulo.optimizees import datasets, files

# Fashion-MNIST


def test_fashion_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "EMBEDDED", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"lacks t10k-images.*run from a checkout"):
        datasets.load("fashion10k")
    put(tmp_path / "t10k-labels-idx1-ubyte.gz", gzip.compress(b""))
    whole, other = (
        gzip.compress(bytes(16 + 784)),
        "is not the published file (its sha256 is not 5b4",
    )
    contents = {whole: other, whole[:-9]: "is damaged", b"junk": "is damaged"}
    contents[whole[:-20] + bytes(20)] = "is damaged"
    for content, words in contents.items():
        put(tmp_path / "t10k-images-idx3-ubyte.gz", content)
        with refused("t10k-images-idx3-ubyte.gz", words, "get it again"):
            datasets.load("fashion10k")


def test_fashion_as_published():
    folder = published("fashion-mnist").parent
    d, test = (datasets.load("fashion", folder, split=split) for split in ("train", "test"))
    assert (len(d), len(test), d.shape) == (60_000, 10_000, (1, 28, 28))
    assert torch.equal(test.x, datasets.load("fashion10k").x)
    pixels = d.x.double()
    assert abs(pixels.mean() - d.mean[0]) < 1e-3
    assert abs(pixels.std() - d.std[0]) < 1e-3


# CIFAR-10


def test_cifar_layout(tmp_path, monkeypatch):
    folder = tmp_path / "cifar10/cifar-10-batches-bin"
    put(folder / "data_batch_1.bin", b"")
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("cifar10", tmp_path)
    for words in [*TRAINING[1:], str(folder), "python tasks.py download cifar10"]:
        assert words in str(error.value)
    sizes = dict(zip([*TRAINING, "test_batch.bin"], range(2, 8), strict=True))
    for name in ("data_batch_1.bin", "test_batch.bin"):  # which is all that cifar10k needs
        publish(folder / name, records(sizes[name]), monkeypatch)
    assert len(datasets.load("cifar10k", tmp_path)) == 2
    assert len(datasets.load("cifar10k", tmp_path, split="test")) == 7
    for name, n in sizes.items():
        publish(folder / name, records(n), monkeypatch)
    d = datasets.load("cifar10", tmp_path)
    raw = np.frombuffer(b"".join(records(k) for k in range(2, 7)), np.uint8).reshape(-1, 3073)
    assert np.array_equal(d.x.numpy().reshape(-1, 3072), raw[:, 1:])
    assert np.array_equal(d.x[3, 1, 0, :5].numpy(), raw[3, 1 + 1024 : 1 + 1029])  # planar: G
    assert d.y.tolist() == raw[:, 0].tolist()
    assert (d.shape, d.classes) == ((3, 32, 32), 10)
    assert len(datasets.load("cifar10", tmp_path, split="test")) == 7
    assert datasets.load("cifar10", tmp_path, size=8).shape == (3, 8, 8)
    put(folder / "data_batch_1.bin", records(2)[:-1])
    with refused("data_batch_1.bin is not the published file"):
        datasets.load("cifar10", tmp_path)


def test_cifar_as_published():
    folder = published("cifar10")
    d = datasets.load("cifar10k", folder.parent)
    test = datasets.load("cifar10", folder.parent, split="test")
    assert len(d) == len(test) == 10_000
    assert d.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert test.y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    x, _ = d.batch(seed(), 2000)
    assert x.mean((0, 2, 3)).abs().max() < 0.05
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.05


# ImageNet


def test_imagenet_layout(tmp_path):
    made = imagenet(tmp_path, 64)
    d = datasets.load("imagenet64", tmp_path)
    assert (len(d), d.shape, d.classes) == (55, (3, 64, 64), 1000)
    x = np.concatenate([m["data"] for m in made])
    y = np.concatenate([m["labels"] for m in made])
    assert np.array_equal(d.x.numpy().reshape(55, -1), x)
    assert np.array_equal(d.y.numpy(), y - 1)
    folder = tmp_path / "imagenet64"
    for path in folder.glob("*.npz"):
        path.unlink()  # converted once: the .npz are no longer needed
    d.x[0] = 7  # what is written to the map does not reach the file
    again = datasets.load("imagenet64", tmp_path, split="train")
    assert np.array_equal(again.x.numpy().reshape(55, -1), x)
    assert torch.equal(d.y, again.y)
    assert sorted(p.name for p in folder.iterdir()) == ["train_x.uint8", "train_y.npy"]
    with open(folder / "train_x.uint8", "r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([77]))
    assert again.x[-1, -1, -1, -1] == 77  # mapped, not read
    with pytest.raises(FileNotFoundError, match=r"lacks val_data.npz: .*image-net.org"):
        datasets.load("imagenet64", tmp_path, split="test")
    imagenet(tmp_path, batches=[1, 2, 4])
    with pytest.raises(FileNotFoundError, match=r"lacks train_data_batch_3.npz, train_.*_5"):
        datasets.load("imagenet32", tmp_path)


NO_IMAGES = "no 32x32 images of 1,000 classes"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": np.arange(10)}, NO_IMAGES),
        ({"labels": np.arange(992, 1002)}, NO_IMAGES),
        ({"labels": np.ones(9, int)}, NO_IMAGES),
        ({"data": np.zeros((10, 12288), np.uint8)}, NO_IMAGES),
        ({"data": np.zeros((10, 3072))}, NO_IMAGES),
        ({"data": np.array([put] * 10, object)}, "is damaged"),
        (b"", "is damaged"),
        (pickle.dumps({"data": 1}), "is damaged"),
        (None, "is damaged"),
    ],
)
def test_imagenet_refuses_and_leaves_no_images_behind(tmp_path, change, words):
    """Changed arrays, other content, or a file that is cut off."""
    imagenet(tmp_path, **(change if isinstance(change, dict) else {}))
    path = tmp_path / "imagenet32/train_data_batch_10.npz"
    if not isinstance(change, dict):
        path.write_bytes(path.read_bytes()[:-100] if change is None else change)
    with refused(path.name, words):
        datasets.load("imagenet32", tmp_path)
    assert not list(path.parent.glob("*train_x*"))


# Any text, as bytes


def test_text_refuses(tmp_path):
    path = put(tmp_path / "a.txt", b"short")
    with refused("5 tokens are too few for seq_len=64: get more text"):
        datasets.load(f"text:{path}")
    with pytest.raises(FileNotFoundError, match=r"lacks nothing.txt: put any text there"):
        datasets.load(f"text:{tmp_path / 'nothing.txt'}")


# LM1B


@pytest.fixture
def fake_sentencepiece(monkeypatch):
    module = type(sys)("sentencepiece")
    module.SentencePieceProcessor = FakeProcessor
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    monkeypatch.setattr(FakeProcessor, "calls", 0)


def test_lm1b_rows_are_sentences_cropped_or_padded(tmp_path, fake_sentencepiece):
    lm1b(tmp_path, "abc\nabcdefgh\n\nx\nab\u2028d\r\n")  # only \n ends a sentence
    lm1b(tmp_path, "held\nout\n", split="heldout")
    put(tmp_path / "lm1b/a.model", b"\x00")
    d = datasets.load("lm1b", tmp_path, seq_len=4)
    rows = [[97, 98, 99, -1, -1], [97, 98, 99, 100, 101], [120, -1, -1, -1, -1]]
    assert d.data.tolist() == [*rows, [97, 98, 0x2028, 100, 13]]
    assert d.classes == 200
    tokens, targets, mask = d.batch(seed(), 50)
    assert tokens.shape == targets.shape == mask.shape == (50, 4)
    assert set(mask.sum(1).tolist()) == {0, 2, 4}
    sizes = [len(datasets.load("lm1b", tmp_path, split=split)) for split in ("train", "test")]
    assert sizes == [4, 2]
    lm1b(tmp_path, "a whole one\nhalf of ano")  # of a download that stopped
    with refused("news.en-00001-of-00100 ends within a sentence: get it again"):
        datasets.load("lm1b", tmp_path, seq_len=5)
    assert not list(tmp_path.rglob("*_5_*"))


def test_lm1b_is_tokenized_once(tmp_path, fake_sentencepiece):
    lm1b(tmp_path, "abc\nab\n")
    model = put(tmp_path / "lm1b/a.model", b"\x01")
    for _ in range(2):
        d = datasets.load("lm1b", tmp_path, seq_len=2)
        assert d.data.tolist() == [[98, 99, 100], [98, 99, -1]]
        assert FakeProcessor.calls == 2
    assert datasets.load("lm1b", tmp_path, seq_len=1).data.tolist() == [[98, 99], [98, 99]]
    model.write_bytes(b"\x02")  # another model: nothing stale is read
    assert datasets.load("lm1b", tmp_path, seq_len=1).data.tolist() == [[99, 100], [99, 100]]


def test_lm1b_without_its_parts(tmp_path, monkeypatch):
    lm1b(tmp_path, "a b\n")
    with pytest.raises(FileNotFoundError, match=r"0 files \*.model: put one sentencepiece"):
        datasets.load("lm1b", tmp_path)
    put(tmp_path / "lm1b/a.model", b"")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match="pip install sentencepiece"):
        datasets.load("lm1b", tmp_path)
    for path in tmp_path.rglob("news.en-000[1-9]?-*"):
        path.unlink()
    lacks = r"lacks news.en-00010-of-00100 to news.en-00099-of-00100: unpack https://www.statmt"
    with pytest.raises(FileNotFoundError, match=lacks):
        datasets.load("lm1b", tmp_path)


# Downloads


TAR = "cifar-10-binary.tar.gz"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    s = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files = {}
    at = f"http://127.0.0.1:{s.server_port}"
    for name, (folder, urls) in list(files.DOWNLOADS.items()):
        here = [f"{at}/{url.rpartition('/')[2]}" for url in urls]
        monkeypatch.setitem(files.DOWNLOADS, name, (folder, here))
    thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield s
    s.shutdown()
    thread.join()
    s.server_close()


def test_download_and_load(server, tmp_path, monkeypatch):
    batches = {
        name: publish(tmp_path / "made" / name, records(2), monkeypatch).read_bytes()
        for name in TRAINING
    }
    server.files[TAR] = tar({f"cifar-10-batches-bin/{k}": x for k, x in batches.items()})
    files.download("cifar10", tmp_path)
    assert len(datasets.load("cifar10", tmp_path)) == 10
    for part, n in (("train", 3), ("t10k", 2)):
        for name, content in (("images-idx3", bytes(16 + 784 * n)), ("labels-idx1", bytes(8 + n))):
            name = f"{part}-{name}-ubyte"
            monkeypatch.setitem(files.SHA256, name, hashlib.sha256(content).hexdigest())
            server.files[f"{name}.gz"] = gzip.compress(content)
    files.download("fashion", tmp_path)
    sizes = [len(datasets.load("fashion", tmp_path, split=x)) for x in ("all", "train", "test")]
    assert sizes == [3, 3, 2]


def test_half_a_download_is_not_data(server, tmp_path, monkeypatch):
    name = "cifar-10-batches-bin/data_batch_1.bin"
    whole = tar({name: publish(tmp_path / name, records(20), monkeypatch).read_bytes()})
    server.files[TAR] = whole[: len(whole) // 2]
    with pytest.raises(OSError, match="try again"):
        files.download("cifar10", tmp_path)
    with refused("data_batch_1.bin is not the published file", "get it again"):
        datasets.load("cifar10k", tmp_path)
    server.files[TAR] = whole
    files.download("cifar10", tmp_path)
    assert len(datasets.load("cifar10k", tmp_path)) == 20


def test_download_tells_what_is_wrong(server, tmp_path, complaint):
    with pytest.raises(OSError, match=rf"{TAR}: HTTP Error 404"):
        files.download("cifar10", tmp_path)
    whole = tar({"fine.bin": records(2)})
    evil = tar({"fine.bin": records(2), "../../outside": b"evil"})
    for content in (evil, whole[: len(whole) // 2], b"junk", b""):
        server.files[TAR] = content
        with pytest.raises(OSError, match=rf"{TAR}: .*: try again"):
            files.download("cifar10", tmp_path / "root")
    assert not list(tmp_path.rglob("outside"))
    with refused("'lm1b' cannot be downloaded from here: unpack", "www.statmt.org"):
        files.download("lm1b", tmp_path)
    with refused("'cifar' cannot be downloaded from here: use cifar10 or fashion"):
        files.download("cifar", tmp_path)
    output = complaint(tasks, "download", "imagenet32", "--data-dir", tmp_path)
    assert output.splitlines()[-1].endswith("https://image-net.org/download-images there.")
