"""Readers and downloads: published layouts in small, damaged and hostile files, the real files."""

import errno
import hashlib
import io
import os
import pickle
import re
import struct
import sys
import tarfile
import threading
import zipfile
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import (
    TRAINING,
    X28,
    Y3,
    Evil,
    Handler,
    cifar,
    fashion,
    gz,
    idx,
    imagenet,
    lm1b,
    pickled_batch,
    published,
    put,
    python2_pickle,
    records,
    refused,
    save_val,
    seed,
    tar,
)

import tasks
from optimizees import datasets, files

# Fashion-MNIST


@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_fashion_layout(tmp_path, split, prefix):
    fashion(tmp_path, gz(idx(X28)), gz(idx(Y3)), prefix)
    d = datasets.load("fashion", tmp_path, split=split, check=False)
    assert np.array_equal(d.x[:, 0].numpy(), X28)
    assert d.y.tolist() == [9, 0, 4]
    with refused(f"{prefix}-images-idx3-ubyte.gz differs from the published file", "check=False"):
        datasets.load("fashion", tmp_path, split=split)


ZIPPED = gz(idx(X28))
HUGE = struct.pack(">4I", 2051, *[2**32 - 1] * 3)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (gz(idx(X28, 2052)), Y3, ["train-images", "magic number 2052, not 2051"]),
        (ZIPPED, X28, ["train-labels", "magic number 2051, not 2049"]),
        (b"", Y3, ["train-images", "magic number 0, not 2051"]),
        (gz(idx(X28)[:-1]), Y3, ["train-images", "as many bytes as its sizes [3, 28"]),
        (gz(idx(X28) + b"!"), Y3, ["train-images", "as many bytes as its sizes"]),
        (gz(idx(X28)[:9]), Y3, ["train-images", "as many bytes as its sizes"]),
        (gz(HUGE), Y3, ["train-images", "as many bytes as its sizes"]),
        (ZIPPED[:-9], Y3, ["train-images", "truncated or not gzip"]),
        (ZIPPED[:-20] + bytes(20), Y3, ["train-images", "truncated or not gzip"]),
        (idx(X28), Y3, ["train-images", "truncated or not gzip"]),
        (gz(idx(X28[:, :27])), Y3, ["train-images", "labels, not uint8 (3, 28, 28)"]),
        (ZIPPED, Y3 + 1, ["train-labels", "labels out of range 0..9"]),
        (gz(idx(X28[:0])), Y3[:0], ["train-labels", "no labels"]),
    ],
)
def test_fashion_refuses(tmp_path, x, y, words):
    fashion(tmp_path, x, gz(idx(y)))
    with refused(*words):
        datasets.load("fashion", tmp_path, check=False)


def test_fashion_as_published():
    folder = published("fashion-mnist")
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
    cifar(tmp_path, *TRAINING, "test_batch.bin")
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
    for words in [*TRAINING, "cifar-10-batches-bin", "python tasks.py download cifar10",
                  "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]:  # fmt: skip
        assert words in str(error.value)
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
    ],
)
def test_cifar_binary_refuses(tmp_path, content, words):
    cifar(tmp_path, "data_batch_1.bin", content=content)
    with refused("data_batch_1.bin", *words):
        datasets.load("cifar10", tmp_path, partial=True, check=False)


X4 = np.random.default_rng(0).integers(0, 256, (4, 3072)).astype(np.uint8)
NEVER = Path("the_pickle_ran")


@pytest.mark.parametrize("writer", ["python 2", "python 3", "fortran"])
def test_cifar_python_layout(tmp_path, writer):
    y = [3, 9, 0, 1]
    if writer == "python 2":
        content = python2_pickle(X4, y)
        assert np.array_equal(pickle.loads(content, encoding="bytes")[b"data"], X4)
    else:
        x = np.asfortranarray(X4) if writer == "fortran" else X4
        content = pickle.dumps({"data": x, "labels": y, "filenames": ["a"]}, protocol=2)
    pickled_batch(tmp_path, content)
    d = datasets.load("cifar10", tmp_path, partial=True, check=False)
    assert np.array_equal(d.x.numpy().reshape(4, -1), X4)
    assert d.y.tolist() == y
    with pytest.raises(FileNotFoundError, match="cifar-10-batches-py lacks data_batch_2, data_b"):
        datasets.load("cifar10", tmp_path)


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
        (pickle.dumps({"data": X4, "labels": [1, 2, 3]}, 2), ["(4, 3072) for 3 labels"]),
        (pickle.dumps({"data": X4[:, :9], "labels": [1] * 4}, 2), ["(4, 9) for 4 labels, not"]),
        (pickle.dumps({"data": X4.astype(int), "labels": [1] * 4}, 2), ["not a CIFAR-10 batch"]),
        (pickle.dumps({"data": X4.astype(object), "labels": [1]}, 2), ["not a CIFAR-10 batch"]),
        (pickle.dumps({"data": X4, "labels": [1] * 4}, 2), ["has 4 images, not 10000"]),
        (pickle.dumps({"labels": [1]}, 2), ["not a CIFAR-10 batch"]),
        (python2_pickle(X4, [1] * 4)[:-40], ["not a CIFAR-10 batch"]),
        (b"", ["not a CIFAR-10 batch"]),
    ],
)
def test_cifar_python_refuses(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    pickled_batch(tmp_path, content)
    with refused("data_batch_1", *words):
        datasets.load("cifar10", tmp_path, partial=True)
    assert not NEVER.exists()


def test_cifar_as_published():
    folder = published("cifar10")
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
    assert torch.equal(d.x, again.x)
    assert torch.equal(d.y, again.y)
    assert sorted(p.name for p in folder.iterdir()) == ["train_x.npy", "train_y.npy"]
    with pytest.raises(FileNotFoundError, match=r"lacks val_data.npz: .*image-net.org"):
        datasets.load(f"imagenet{side}", tmp_path, split="val")


def test_imagenet_missing_batch(tmp_path):
    imagenet(tmp_path, batches=[1, 2, 4])
    with pytest.raises(FileNotFoundError, match=r"lacks train_data_batch_3.npz, train_.*_5"):
        datasets.load("imagenet32", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": np.arange(10)}, ["labels out of range 1..1000"]),
        ({"labels": np.arange(992, 1002)}, ["labels out of range 1..1000"]),
        ({"labels": np.ones(9, int)}, ["(10, 3072) for 9 labels"]),
        ({"labels": np.ones(10)}, ["labels out of range"]),
        ({"data": np.zeros((10, 12288), np.uint8)}, ["(10, 12288) for 10 labels"]),
        ({"data": np.zeros((10, 3072))}, ["float64 images"]),
        ({"data": np.array([NEVER] * 10, object)}, ["no readable array 'data'"]),
        ({"data": None}, ["no readable array 'data'"]),
    ],
)
def test_imagenet_refuses_and_leaves_no_images_behind(tmp_path, change, words):
    imagenet(tmp_path, **change)
    with refused("train_data_batch_10.npz", *words):
        datasets.load("imagenet32", tmp_path)
    assert not list((tmp_path / "imagenet32").glob("*train_x*"))


def zipped(content: bytes) -> bytes:
    """An .npz whose arrays have this content."""
    with zipfile.ZipFile(out := io.BytesIO(), "w") as z:
        z.writestr("labels.npy", content)
        z.writestr("data.npy", content)
    return out.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"junk", pickle.dumps({"data": 1}), zipped(b"not an array"), zipped(b""), None],
)
def test_imagenet_refuses_what_is_not_an_npz(tmp_path, content):
    imagenet(tmp_path)
    path = tmp_path / "imagenet32/train_data_batch_3.npz"
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with refused("train_data_batch_3.npz has no"):
        datasets.load("imagenet32", tmp_path)


def test_imagenet_is_mapped_not_read(tmp_path):
    folder = save_val(tmp_path)
    d = datasets.load("imagenet32", tmp_path, split="val")
    assert len(d) == 2
    with open(folder / "val_x.npy", "r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([77]))
    assert d.x[-1, -1, -1, -1] == 77  # seen through the map
    d.x[0] = 7  # and what is written to the map does not reach the file
    assert not datasets.load("imagenet32", tmp_path, split="val").x[0].any()


FIX = "delete val_x.npy and val_y.npy, to convert"


def test_damaged_conversions_are_refused(tmp_path):
    """Converted files are checked as the published ones are."""

    def check(*words):
        with refused(*words, FIX):
            datasets.load("imagenet32", tmp_path, split="val")

    for y in (np.array([5000, -3]), np.array([0.5, 1.0]), np.zeros((2, 2), int), np.array(3)):
        save_val(tmp_path, y=y)
        check("val_y.npy has no labels, or labels out of range 0..999")
    save_val(tmp_path, y=np.array([5, 999, 3]))
    check("val_x.npy has uint8 images (2, 3, 32, 32) for 3 labels")
    save_val(tmp_path, x=np.zeros((2, 3, 32, 32)))
    check("val_x.npy has float64 images")
    for name in ("val_x.npy", "val_y.npy"):
        for content in (b"", b"junk", bytes(200), None):
            path = save_val(tmp_path) / name
            path.write_bytes(path.read_bytes()[:-10] if content is None else content)
            check(f"{name} is damaged")


# Any text, as bytes


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Größe".encode("latin1") * 99, ["some.txt is not UTF-8 text (byte 2)"]),
        (b"short", ["seq_len=64 needs 65 tokens, not 5: make it 4 or less"]),
        (b"", ["some.txt is empty"]),
    ],
)
def test_text_refuses(tmp_path, content, words):
    path = put(tmp_path / "some.txt", content)
    with refused(*words):
        datasets.load(f"text:{path}")
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing.txt"):
        datasets.load(f"text:{tmp_path / 'nothing.txt'}")


def test_text_as_published():
    path = published("tinyshakespeare") / "input.txt"
    content = path.read_bytes()
    assert hashlib.sha256(content).hexdigest().startswith("86c4e6aa9db7c042ec79f339dcb96d42")
    d = datasets.load(f"text:{path}", seq_len=32)
    assert len(d) == len(content) - 32
    tokens, targets, _ = d.batch(seed(), 8)
    assert bytes([*tokens[0].tolist(), targets[0, -1].item()]) in content


# LM1B


def by_letter(sentence: str) -> list[int]:
    return [ord(c) for c in sentence]


def load_lm1b(root: Path, **kwargs) -> datasets.Tokens:
    kwargs = {"tokenizer": by_letter, "partial": True, "check": False} | kwargs
    return datasets.load("lm1b", root, **kwargs)


def test_lm1b_rows_are_sentences_cropped_or_padded(tmp_path):
    lm1b(tmp_path, "abc\nabcdefgh\n\n", "x\nab\u2028d\r")  # only \n ends a sentence
    d = load_lm1b(tmp_path, seq_len=4)
    rows = [[97, 98, 99, -1, -1], [97, 98, 99, 100, 101], [120, -1, -1, -1, -1]]
    assert d.data.tolist() == [*rows, [97, 98, 0x2028, 100, 13]]
    assert d.classes == 32_000
    tokens, targets, mask = d.batch(seed(), 50)
    assert tokens.shape == targets.shape == mask.shape == (50, 4)
    assert set(mask.sum(1).tolist()) == {0, 2, 4}
    for ids in ([32_000], [-1]):
        with refused("news.en-00001-of-00100 got token ids outside 0..31999"):
            load_lm1b(tmp_path, tokenizer=lambda _, ids=ids: ids)


def test_lm1b_splits_and_bad_files(tmp_path):
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
    for content, words in [(b"\xff\xfe", "news.en-00001-of-00100 is not UTF-8 text (byte 0)"),
                           (b"", "news.en-00001-of-00100 is empty"),
                           (b" \n", "has no sentences in its files")]:  # fmt: skip
        next(tmp_path.rglob("news.en-00001-of-00100")).write_bytes(content)
        with refused(words):
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

    def load(seq_len):
        return load_lm1b(tmp_path, tokenizer=None, seq_len=seq_len)

    lm1b(tmp_path, "abc\nab\n")
    model = put(tmp_path / "lm1b/some.model", b"\x01")
    for _ in range(2):
        d = load(2)
        assert d.data.tolist() == [[98, 99, 100], [98, 99, -1]]
        assert d.classes == 200
        assert FakeProcessor.calls == 2
    assert load(1).data.tolist() == [[98, 99], [98, 99]]
    model.write_bytes(b"\x02")  # another model: nothing stale is read
    assert load(1).data.tolist() == [[99, 100], [99, 100]]
    lm1b(tmp_path, "abcd\nab\n")
    assert load(3).data[0].tolist() == [99, 100, 101, 102]
    for cache in (tmp_path / "lm1b").glob("*.int32"):
        cache.write_bytes(cache.read_bytes()[:-1])
    with refused(".int32 is empty or truncated: delete it"):
        load(3)
    model.write_bytes(b"junk")
    with refused("some.model is not a sentencepiece model"):
        load(3)


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


def test_lm1b_as_published(tmp_path):
    (tmp_path / "lm1b").symlink_to(published("lm1b-heldout"))
    d = load_lm1b(tmp_path, split="heldout", check=True, tokenizer=lambda s: s.encode(), seq_len=48)
    assert len(d) == 6075
    first = b"Having a little flexibility on that issue would go a long"
    assert bytes(d.data[0].tolist()) == first[:49]


# Downloads


TAR = "cifar-10-binary.tar.gz"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    s = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    s.files, s.requests, s.ranges, s.breaks_at = {}, [], True, None
    s.url = f"http://127.0.0.1:{s.server_port}"
    thread = threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield s
    s.shutdown()
    thread.join()
    s.server_close()


def serve(server, monkeypatch, name: str, content: bytes) -> bytes:
    server.files[name] = content
    monkeypatch.setitem(files.MD5, name, hashlib.md5(content).hexdigest())
    return content


@pytest.fixture
def archive(server, monkeypatch) -> bytes:
    content = tar({f"cifar-10-batches-bin/{name}": records(2) for name in TRAINING})
    return serve(server, monkeypatch, TAR, content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download_and_load(server, archive, tmp_path):
    files.download("cifar10", tmp_path, server.url)
    assert len(datasets.load("cifar10", tmp_path, check=False)) == 10
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]
    files.download("cifar10", tmp_path, server.url)
    assert server.requests == [(TAR, None)]  # it was there and right


def test_download_resumes(server, archive, tmp_path):
    server.breaks_at = 5000
    with pytest.raises(OSError, match=rf"stopped after 5000 of {len(archive)} bytes.*resumes"):
        files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == [f"{TAR}.part"]
    server.breaks_at = None
    files.download("cifar10", tmp_path, server.url)
    assert server.requests == [(TAR, None), (TAR, "bytes=5000-")]
    assert (tmp_path / "cifar10" / TAR).read_bytes() == archive
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]


def test_download_onto_a_part(server, archive, tmp_path):
    """The server may ignore Range; and the part may be the whole file, which is answered by 416."""
    part = put(tmp_path / "cifar10" / f"{TAR}.part", b"the beginning of something else")
    server.ranges = False
    files.download("cifar10", tmp_path, server.url)
    assert server.requests[0][1] == "bytes=31-"
    assert (tmp_path / "cifar10" / TAR).read_bytes() == archive
    (tmp_path / "cifar10" / TAR).rename(part)
    server.ranges = True
    files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == ["cifar-10-batches-bin", TAR]


def test_download_checks_before_it_renames(server, archive, tmp_path):
    server.files[TAR] = archive[:-1] + b"!"
    with refused(f"{TAR} has the wrong checksum", "deleted, try again"):
        files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == []
    put(tmp_path / "cifar10" / f"{TAR}.part", b"a bad beginning")
    server.files[TAR] = archive
    with refused("wrong checksum"):  # resumed onto the wrong bytes
        files.download("cifar10", tmp_path, server.url)
    files.download("cifar10", tmp_path, server.url)  # and the next one starts clean


def test_download_of_several_files(server, tmp_path, monkeypatch):
    for prefix in ("train", "t10k"):
        for kind, array in (("images-idx3", X28), ("labels-idx1", Y3)):
            serve(server, monkeypatch, f"{prefix}-{kind}-ubyte.gz", gz(idx(array)))
    files.download("fashion", tmp_path, server.url)
    assert len(datasets.load("fashion", tmp_path, check=False)) == 3
    assert len(datasets.load("fashion", tmp_path, split="test", check=False)) == 3
    put(tmp_path / "fashion-mnist/t10k-labels-idx1-ubyte.gz", b"damaged")
    files.download("fashion", tmp_path, server.url)
    assert len(server.requests) == 5  # only the damaged one again


def test_download_tells_what_is_wrong(server, tmp_path, complaint):
    with pytest.raises(OSError, match=r"cifar-10-binary.tar.gz: HTTP Error 404"):
        files.download("cifar10", tmp_path, server.url)
    with pytest.raises(OSError, match=r"python.tar.gz: .*refused"):
        files.download("cifar10-python", tmp_path, "http://127.0.0.1:9")
    with refused("'lm1b' cannot be downloaded from here: unpack", "www.statmt.org"):
        files.download("lm1b", tmp_path)
    with refused("'cifar' cannot be", "there are cifar10, cifar10-python, fashion"):
        files.download("cifar", tmp_path)
    said = complaint(tasks, "download", "imagenet32", "--data-dir", tmp_path)
    assert said.splitlines()[-1].endswith("https://image-net.org/download-images there.")


def test_unpacking_stays_in_its_folder(server, tmp_path, monkeypatch):
    serve(server, monkeypatch, TAR, tar({"fine.bin": b"fine", "../../outside": b"evil"}))
    with refused(f"{TAR} was not unpacked", "download it again"):
        files.download("cifar10", tmp_path / "root", server.url)
    assert not list(tmp_path.rglob("outside"))
    assert names(tmp_path / "root/cifar10") == [TAR]


def test_a_full_disk_is_not_the_archives_fault(server, archive, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with refused(f"{TAR} was not unpacked", "No space left", "make room there"):
        files.download("cifar10", tmp_path, server.url)
    assert names(tmp_path / "cifar10") == [TAR]


def test_published_checksums():
    assert files.MD5["cifar-10-binary.tar.gz"] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert files.MD5["cifar-10-python.tar.gz"] == "c58f30108f718f92721af3b95e74349a"
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in files.SHA256.values())
    assert {name for *_, some in files.DOWNLOADS.values() for name in some} == set(files.MD5)
