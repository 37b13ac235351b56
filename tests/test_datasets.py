"""Data sets: batches by seed, pooling, splits, text, the teacher; readers of published files."""

import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mulo.optimizees import datasets


def seed(n: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(n)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refused(*words: str, error=ValueError):
    """pytest.raises for a one-sentence error that has these words in this order."""
    return pytest.raises(error, match=".*".join(map(re.escape, words)) + r"[^\n]*\.$")


def images(**kwargs) -> datasets.Images:
    """Labelled by their index, so that the label tells which image was drawn."""
    x = torch.randint(256, (50, 3, 4, 4), generator=seed(1)).byte()
    return datasets.Images(x, torch.arange(50), 50, [100.0, 101, 102], [50.0, 51, 52], **kwargs)


def test_batch_gathers_and_normalises():
    d = images()
    x, y = d.batch(seed(), 200)
    assert (x.shape, x.dtype, y.dtype) == ((200, 3, 4, 4), torch.float32, torch.int64)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (d.mean, d.std))
    torch.testing.assert_close(x, (d.x[y].float() - mean) / std, rtol=1e-5, atol=1e-5)
    assert len(set(y.tolist())) > 40  # with replacement, but everything comes


DATA = {
    "images": images,
    "windows": lambda: datasets.Tokens(torch.arange(100), 100, 5),
    "rows": lambda: datasets.Tokens(torch.arange(180).view(30, 6), 180, 5),
    "teacher": datasets.Teacher,
}


@pytest.mark.parametrize("name", DATA)
def test_a_seed_determines_the_batches(name):
    a, b, generator, same = DATA[name](), DATA[name](), seed(3), seed(3)
    drawn = []
    for size in (7, 1, 7):
        torch.rand(3)  # the global generator does not matter
        drawn.append(a.batch(generator, size))
        assert all(map(torch.equal, drawn[-1], b.batch(same, size)))
        assert drawn[-1][0].shape == (size, *a.shape)
    assert not torch.equal(drawn[0][0], drawn[2][0])
    both = a.batch([seed(4), seed(5)], 7)  # as from each alone
    for together, *alone in zip(both, a.batch(seed(4), 7), a.batch(seed(5), 7), strict=True):
        assert torch.equal(together, torch.stack(alone))


def test_batches_are_on_the_device():
    """The meta device stands for a GPU."""
    tokens = datasets.Tokens(torch.arange(50), 50, 8, device="meta")
    for d in (images(device="meta"), tokens, datasets.Teacher(device="meta")):
        batch = d.batch([seed(), seed()], 6)
        assert {x.device.type for x in batch} == {"meta"}
        assert batch[0].shape == (2, 6, *d.shape)


def test_pool_by_hand():
    x = torch.arange(16).view(1, 1, 4, 4).byte()
    x[0, 0, 0, 0] = 253
    d = datasets.Images(x, torch.zeros(1).long(), 10, [0.0], [1.0])
    # means of the 2x2 blocks: (253+1+4+5)/4 = 65.75, 4.5 (to even), 10.5 (to even), 12.5 (to even)
    assert d.pool(2).x.flatten().tolist() == [66, 4, 10, 12]
    with refused("cannot pool (1, 4, 4) images to size=5: use 1 to 4"):
        d.pool(5)


def test_embedded_fashion(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # it does not depend on the current directory
    d = datasets.load()
    assert (len(d), d.shape, d.classes) == (10_000, (1, 28, 28), 10)
    assert d.y[:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert torch.bincount(d.y).tolist() == [1000] * 10
    x, _ = d.batch(seed(), 10_000)
    assert abs(x.mean().item()) < 0.02
    assert abs(x.std().item() - 1) < 0.02
    assert datasets.load("fashion10k", size=14).shape == (1, 14, 14)
    tokens, targets, mask = datasets.load("pixels").batch(seed(), 50)
    assert (tokens.shape, targets.max()) == ((50, 64), 15)
    assert (tokens[:, 0] == 16).all()
    with refused("the size of pixels must be a square, such as 64, not 50"):
        datasets.load("pixels", size=50)
    assert mask.all()


def test_splits_of_data_without_test_files(tmp_path):
    """ "train" and "test" make up "all", which is the default."""
    put(tmp_path / "a.txt", bytes(range(125)) * 8)
    for name, field, n in (
        ("fashion10k", "x", 8000), ("fashion10k", "y", 8000), ("pixels", "data", 8000),
        ("text:a.txt", "data", 900),
    ):  # fmt: skip
        default, *parts = (
            getattr(datasets.load(name, tmp_path, **options), field)
            for options in ({}, {"split": "all"}, {"split": "train"}, {"split": "test"})
        )
        assert all(map(torch.equal, parts, (default, default[:n], default[n:])))
    with refused("cifar10 has no split 'val': use all, train or test"):
        datasets.load("cifar10", split="val")


def test_fixed_sample():
    images, teacher = datasets.load(size=8, split="test"), datasets.load("teacher")
    x, y = datasets.fixed_sample(images, 3000)
    assert torch.equal(torch.bincount(y), torch.bincount(images.y))  # each once
    assert torch.equal(datasets.fixed_sample(images, 30)[0], x[:30])
    samples = [datasets.fixed_sample(teacher, 20) for _ in range(2)]
    assert all(map(torch.equal, *samples))


# ---------------------------------------------------------------- text


def test_tokens_are_shifted_windows():
    d = datasets.Tokens(torch.arange(20), 20, 6)
    tokens, targets, mask = d.batch(seed(), 500)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert mask.dtype == torch.bool
    assert mask.all()
    assert (tokens[:, 0].min(), targets[:, -1].max()) == (0, 19)  # both ends can be reached


def test_mask_is_false_where_the_target_is_padding():
    rows = torch.tensor([[5, 0, 7, -1, -1], [1, -1, -1, -1, -1], [2, 3, 4, 5, 6]])
    batch = datasets.Tokens(rows, 8, 4).take(torch.arange(3))
    tokens, targets, mask = (x.tolist() for x in batch)
    assert tokens == [[5, 0, 7, 0], [1, 0, 0, 0], [2, 3, 4, 5]]  # the first 0 is a token
    assert targets == [[0, 7, 0, 0], [0, 0, 0, 0], [3, 4, 5, 6]]
    assert mask == [[True, True, False, False], [False] * 4, [True] * 4]
    assert batch[0].dtype == batch[1].dtype == torch.int64


def test_text_is_read_as_bytes(tmp_path, monkeypatch):
    """From a path, or from the folder of the data: the argument, $MULO_DATA or ./data."""
    content = "Größe, 大きさ. ".encode() * 20
    path = put(tmp_path / "data/a.txt", content)
    put(tmp_path / "other/a.txt", bytes(80))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULO_DATA", raising=False)
    for d in (datasets.load(f"text:{path}"), datasets.load("text:a.txt")):
        assert bytes(d.data.tolist()) == content
        assert (d.classes, d.shape, len(d)) == (256, (64,), len(content) - 64)
    monkeypatch.setenv("MULO_DATA", "other")
    assert not datasets.load("text:a.txt").data.any()
    assert datasets.load("text:a.txt", "data").data.any()
    with refused("are too few for seq_len=999: get more text"):
        datasets.load(f"text:{path}", size=999)
    with refused("lacks nothing.txt: put any text there", error=FileNotFoundError):
        datasets.load("text:nothing.txt")


# ---------------------------------------------------------------- the teacher


def test_teacher():
    """The spectrum of its inputs; its labels are samples of its softmax."""
    t = datasets.Teacher(dim=16, classes=5, alpha=1.0)
    x, y = t.batch(seed(), 100_000)
    std = x.std(0)
    torch.testing.assert_close(std / std[0], 1 / torch.arange(1.0, 17), rtol=0.02, atol=0)
    assert x.square().mean().item() == pytest.approx(1, rel=0.01)
    assert (torch.corrcoef(x.T) - torch.eye(16)).abs().max() < 0.02
    log_p = t.log_probs(x)
    p0 = log_p[:, 0].exp()  # a class is as frequent as p says, among inputs with similar p
    for low, high in [(0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1)]:
        among = (p0 > low) & (p0 <= high)
        assert among.sum() > 1000
        assert abs((y[among] == 0).float().mean() - p0[among].mean()) < 0.03


# ---------------------------------------------------------------- published files


@pytest.mark.parametrize("name", ["cifar", "text", "text:", "teacher7"])
def test_unknown_names(name):
    with refused(f"unknown data set {name!r}: use fashion10k, ", "or text:<path>"):
        datasets.load(name)


def test_cifar_layout(tmp_path, monkeypatch):
    def records(n):
        r = np.random.default_rng(n).integers(0, 256, (3, 3073)).astype(np.uint8)
        r[:, 0] = np.arange(3) + n
        return r

    monkeypatch.setattr(datasets, "CIFAR10_BYTES", 3 * 3073)
    folder = tmp_path / "cifar10/cifar-10-batches-bin"
    put(folder / "data_batch_1.bin", records(0).tobytes())  # all that cifar10k needs
    assert datasets.load("cifar10k", tmp_path).y.tolist() == [0, 1, 2]
    with refused("lacks", "data_batch_2.bin: unpack http", error=FileNotFoundError):
        datasets.load("cifar10", tmp_path)
    for k, name in enumerate([f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]):
        put(folder / name, records(k).tobytes())
    d, raw = datasets.load("cifar10", tmp_path), np.concatenate([records(k) for k in range(5)])
    assert np.array_equal(d.x.numpy().reshape(-1, 3072), raw[:, 1:])
    assert np.array_equal(d.x[3, 1, 0, :5].numpy(), raw[3, 1 + 1024 : 1 + 1029])  # planar: G
    assert d.y.tolist() == raw[:, 0].tolist()
    assert (d.shape, d.classes) == ((3, 32, 32), 10)
    assert datasets.load("cifar10", tmp_path, split="test").y.tolist() == [5, 6, 7]
    put(folder / "data_batch_1.bin", records(0)[:-1].tobytes())
    with refused("data_batch_1.bin is incomplete: get it again"):
        datasets.load("cifar10k", tmp_path)


def test_cifar_as_published():
    folder = os.environ.get("MULO_DATA")
    if not folder or not Path(folder, "cifar10").is_dir():
        pytest.skip("needs cifar10 in the folder that $MULO_DATA names")
    d = datasets.load("cifar10k", folder)
    test = datasets.load("cifar10", folder, split="test")
    assert len(d) == len(test) == 10_000
    assert d.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert test.y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    x, _ = d.batch(seed(), 2000)
    assert x.mean((0, 2, 3)).abs().max() < 0.05
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.05


def imagenet(root: Path, side: int = 32, **change) -> list[dict]:
    """Write train_data_batch_k.npz of k images each; `change` replaces arrays of the tenth."""
    folder = root / f"imagenet{side}"
    folder.mkdir()
    r, written = np.random.default_rng(0), []
    for k in range(1, 11):
        x = r.integers(0, 256, (k, 3 * side**2)).astype(np.uint8)
        arrays = {"data": x, "labels": r.integers(1, 1001, k), "mean": x.mean(0)}
        arrays |= change if k == 10 else {}
        np.savez(folder / f"train_data_batch_{k}.npz", **arrays)
        written.append(arrays)
    return written


def test_imagenet_layout(tmp_path):
    written = imagenet(tmp_path, 64)
    d = datasets.load("imagenet64", tmp_path)
    assert (len(d), d.shape, d.classes) == (55, (3, 64, 64), 1000)
    x, y = (np.concatenate([arrays[name] for arrays in written]) for name in ("data", "labels"))
    assert np.array_equal(d.x.numpy().reshape(55, -1), x)
    assert np.array_equal(d.y.numpy(), y - 1)
    folder = tmp_path / "imagenet64"
    for path in folder.glob("*.npz"):
        path.unlink()  # converted once: the .npz are no longer needed
    again = datasets.load("imagenet64", tmp_path, split="train")
    assert np.array_equal(again.x.numpy().reshape(55, -1), x)
    assert torch.equal(d.y, again.y)
    assert sorted(p.name for p in folder.iterdir()) == ["train_x.uint8", "train_y.npy"]
    with open(folder / "train_x.uint8", "r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([77]))
    assert again.x[-1, -1, -1, -1] == 77  # mapped, not read
    with refused("lacks val_data.npz: ", "image-net.org", error=FileNotFoundError):
        datasets.load("imagenet64", tmp_path, split="test")


NO_IMAGES = "has no 32x32 images of 1,000 classes"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": np.arange(10)}, NO_IMAGES),
        ({"labels": np.arange(992, 1002)}, NO_IMAGES),
        ({"data": np.zeros((10, 12288), np.uint8)}, NO_IMAGES),
        ({"data": np.array([put] * 10, object)}, "is damaged"),
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


@pytest.fixture
def lm1b(tmp_path, monkeypatch):
    """A folder with a model and both splits, each with its text in the first of its files."""
    module = type(sys)("sentencepiece")
    module.SentencePieceProcessor = FakeProcessor
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    monkeypatch.setattr(FakeProcessor, "calls", 0)
    texts = {  # only \n ends a sentence
        "training": ("abc\nabcdefgh\n\nx\nab\u2028d\r\n", "news.en-{:05}-of-00100", range(1, 100)),
        "heldout": ("held\nout\n", "news.en.heldout-{:05}-of-00050", range(50)),
    }
    for part, (text, name, numbers) in texts.items():
        folder = tmp_path / "lm1b" / datasets.LM1B / f"{part}-monolingual.tokenized.shuffled"
        for k in numbers:
            put(folder / name.format(k), text.encode() if k == numbers[0] else b"")
    put(tmp_path / "lm1b/a.model", b"\x00")
    return tmp_path


def test_lm1b_rows_are_sentences_cropped_or_padded(lm1b):
    """They are tokenized once for a model and a length."""
    rows = [[97, 98, 99, -1, -1], [97, 98, 99, 100, 101], [120, -1, -1, -1, -1]]
    for _ in range(2):
        d = datasets.load("lm1b", lm1b, size=4)
        assert d.data.tolist() == [*rows, [97, 98, 0x2028, 100, 13]]
        assert FakeProcessor.calls == 4
    assert d.classes == 200
    assert len(datasets.load("lm1b", lm1b, split="test")) == 2
    assert datasets.load("lm1b", lm1b, size=1).data[0].tolist() == [97, 98]
    put(lm1b / "lm1b/a.model", b"\x02")
    assert datasets.load("lm1b", lm1b, size=1).data[0].tolist() == [99, 100]


def test_lm1b_without_its_parts(lm1b):
    (lm1b / "lm1b/a.model").unlink()
    with refused("0 files *.model: put one sentencepiece", error=FileNotFoundError):
        datasets.load("lm1b", lm1b)
    next((lm1b / "lm1b").rglob("news.en-00099-of-00100")).unlink()
    with refused("lacks", "news.en-00099-of-00100: unpack http", error=FileNotFoundError):
        datasets.load("lm1b", lm1b)
