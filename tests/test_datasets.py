"""Data sets in memory: batches by seed, pooling, windows of text, the teacher; their names."""

import math

import pytest
import torch
from data_files import put, refused, seed

from mulo.optimizees import datasets

# Images and their batches


def images(n: int = 50, shape=(3, 4, 4), **kwargs) -> datasets.Images:
    x = torch.randint(256, (n, *shape), generator=seed(1)).byte()
    channels = shape[0]
    mean, std = [100.0 + c for c in range(channels)], [50.0 + c for c in range(channels)]
    return datasets.Images(x, torch.arange(n) % 10, 10, mean, std, **kwargs)


def test_batch_gathers_and_normalises():
    d = images()
    d.y = torch.arange(50)  # so that the label tells which image was drawn
    x, y = d.batch(seed(), 200)
    assert (x.shape, x.dtype, y.dtype) == ((200, 3, 4, 4), torch.float32, torch.int64)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (d.mean, d.std))
    torch.testing.assert_close(x, (d.x[y].float() - mean) / std, rtol=1e-5, atol=1e-5)
    assert len(set(y.tolist())) > 40  # with replacement, but everything comes


@pytest.mark.parametrize("name", ["images", "tokens", "rows", "teacher"])
def test_same_seed_same_batches_on_any_sequence_of_calls(name):
    rows = torch.randint(9, (30, 6), generator=seed(2))
    make = {
        "images": images,
        "tokens": lambda: datasets.Tokens(torch.arange(100), 100, 5),
        "rows": lambda: datasets.Tokens(rows, 9, 5),
        "teacher": datasets.Teacher,
    }[name]
    a, b, ga, gb = make(), make(), seed(3), seed(3)
    seen = []
    for size in (7, 1, 7):
        torch.rand(3)  # the global generator must not matter
        one, two = a.batch(ga, size), b.batch(gb, size)
        assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))
        assert one[0].shape == (size, *a.shape)
        seen.append(one[0])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(a.batch(seed(4), 7)[0], seen[0])
    several = a.batch([seed(4), seed(5)], 7)  # as from each alone
    for together, *alone in zip(several, a.batch(seed(4), 7), a.batch(seed(5), 7), strict=True):
        assert torch.equal(together, torch.stack(alone))


def test_what_does_not_fit_stays_and_batches_move(monkeypatch):
    monkeypatch.setattr(datasets, "_place", lambda x, device: x)
    d = images(device="meta")  # stands for a device that is too small
    assert d.x.device.type == "cpu"
    x, y = d.batch([seed(), seed()], 6)
    assert x.device.type == y.device.type == "meta"
    assert x.shape == (2, 6, 3, 4, 4)
    t = datasets.Tokens(torch.arange(50), 50, 8, device="meta")
    assert t.data.device.type == "cpu"
    assert {v.device.type for v in t.batch(seed(), 3)} == {"meta"}


def test_pool_by_hand():
    x = torch.arange(16).view(1, 1, 4, 4).byte()
    x[0, 0, 0, 0] = 255
    d = datasets.Images(x, torch.zeros(1).long(), 10, [0.0], [1.0])
    # means of the 2x2 blocks: (255+1+4+5)/4 = 66.25, 4.5 (to even), 10.5 (to even), 12.5 (to even)
    assert d.pool(2).x.flatten().tolist() == [66, 4, 10, 12]
    assert d.pool(2).x.dtype == torch.uint8
    assert torch.equal(d.pool(4).x, x)
    rows = [(0, 2), (1, 3), (2, 4)]  # windows of adaptive pooling from 4 to 3
    by_hand = [[x[0, 0, a:b, c:e].float().mean().round().item() for c, e in rows] for a, b in rows]
    assert d.pool(3).x[0, 0].tolist() == by_hand
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
    p = datasets.load("fashion10k", size=14)
    assert p.shape == (1, 14, 14)
    full = d.x.view(-1, 14, 2, 14, 2).float().mean((2, 4)).round()
    assert torch.equal(p.x[:, 0], full.byte())
    assert datasets.load(size=8).batch(seed(), 5)[0].shape == (5, 1, 8, 8)
    assert "Zalando" in (datasets.EMBEDDED / "LICENSE").read_text()


# Splits


def test_splits_are_disjoint(tmp_path):
    """Of sets without test files: "train" and "test" make up "all", which is the default."""
    put(tmp_path / "a.txt", bytes(range(125)) * 8)
    for name, field, n in (
        ("fashion10k", "x", 8000), ("fashion10k", "y", 8000), ("pixels", "data", 8000),
        ("text:a.txt", "data", 900),
    ):  # fmt: skip
        default, *parts = (
            getattr(datasets.load(name, tmp_path, **options), field)
            for options in ({}, {"split": "all"}, {"split": "train"}, {"split": "test"})
        )
        assert torch.equal(default, parts[0])
        assert torch.equal(default[:n], parts[1])
        assert torch.equal(default[n:], parts[2])
    classes = torch.bincount(datasets.load(split="test").y)
    assert (classes.min(), classes.max()) == (173, 224)  # no class is missing
    assert datasets.load("teacher", split="test").seed == datasets.load("teacher").seed


def test_fixed_sample():
    test = datasets.load(size=8, split="test")
    x, y = datasets.fixed_sample(test, 3000)
    assert len(x) == 2000
    assert torch.equal(torch.bincount(y), torch.bincount(test.y))  # each once
    few, _ = datasets.fixed_sample(test, 30)
    assert torch.equal(few, x[:30])
    assert datasets.fixed_sample(datasets.load("pixels"), 7)[2].shape == (7, 64)
    x, y = datasets.fixed_sample(datasets.load("teacher"), 20)
    assert torch.equal(y, datasets.fixed_sample(datasets.load("teacher"), 20)[1])


# Text


def test_tokens_are_shifted_windows():
    d = datasets.Tokens(torch.arange(20), 20, 6)
    assert len(d) == 14
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


def test_text_as_bytes(tmp_path):
    content = "Größe, 大きさ. ".encode() * 20
    d = datasets.load(f"text:{put(tmp_path / 'a.txt', content)}", seq_len=16)
    assert (d.classes, len(d)) == (256, len(content) - 16)
    tokens, targets, mask = d.batch(seed(), 12)
    assert mask.all()
    for a, b in zip(tokens, targets, strict=True):
        assert bytes([*a.tolist(), b[-1].item()]) in content


def test_pixels():
    tokens, targets, mask = datasets.load("pixels").batch(seed(), 50)
    assert tokens.shape == targets.shape == (50, 64)
    assert (tokens[:, 0] == 16).all()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert mask.all()
    assert targets.max() == 15


# The teacher


def floor(teacher: datasets.Teacher, n: int) -> float:
    """The Bayes loss, which is the mean entropy of p(y | x), estimated from n inputs."""
    log_p = teacher.log_probs(teacher.batch(seed(), n)[0])
    return -(log_p.exp() * log_p).sum(-1).mean().item()


def test_teacher_spectrum():
    t = datasets.Teacher(dim=16, alpha=1.0)
    x, _ = t.batch(seed(), 100_000)
    std = x.std(0)
    torch.testing.assert_close(std / std[0], 1 / torch.arange(1.0, 17), rtol=0.02, atol=0)
    assert x.square().mean().item() == pytest.approx(1, rel=0.01)
    assert (torch.corrcoef(x.T) - torch.eye(16)).abs().max() < 0.02
    assert x.mean(0).abs().max() < 0.02


def test_teacher_labels_follow_its_softmax():
    t = datasets.Teacher(classes=5)
    x, y = t.batch(seed(), 50_000)
    log_p = t.log_probs(x)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(len(x)))
    # a class is as frequent as p says: overall, and among inputs with similar p
    frequency = torch.bincount(y, minlength=5) / len(y)
    torch.testing.assert_close(frequency, log_p.exp().mean(0), rtol=0, atol=0.006)
    p0 = log_p[:, 0].exp()
    for low, high in [(0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1)]:
        among = (p0 > low) & (p0 <= high)
        assert among.sum() > 1000
        assert abs((y[among] == 0).float().mean() - p0[among].mean()) < 0.03
    # so the teacher's own loss on its labels is the floor, which is above 0 and below chance
    loss = torch.nn.functional.nll_loss(log_p, y).item()
    assert loss == pytest.approx(floor(t, 50_000), abs=0.015)
    assert 0.2 < loss < math.log(5) - 0.2


def test_teacher_is_made_by_its_seed_and_temperature():
    x = torch.randn(3, 64, generator=seed())
    a, b = datasets.Teacher(seed=1), datasets.load("teacher")
    assert torch.equal(a.log_probs(x), datasets.Teacher(seed=1).log_probs(x))
    assert not torch.equal(a.log_probs(x), b.log_probs(x))
    cold, flat = datasets.Teacher(temperature=50.0), datasets.Teacher(temperature=0.0)
    assert floor(cold, 5000) < floor(b, 5000) < floor(flat, 5000)
    assert floor(flat, 100) == pytest.approx(math.log(10), rel=1e-5)
    for name, sizes in datasets.TEACHERS.items():
        teacher = datasets.load(f"teacher{name}")
        assert (teacher.shape, teacher.classes) == ((sizes["dim"],), sizes["classes"])
        assert floor(teacher, 2000) < 0.9 * math.log(sizes["classes"])  # there is much to learn
    assert len({sizes["seed"] for sizes in datasets.TEACHERS.values()}) == len(datasets.TEACHERS)


# Names and folders


def test_names_splits_and_folders(tmp_path, monkeypatch):
    for name in ("cifar", "text", "text:", "teacher7"):
        with refused(f"unknown data set {name!r}: use fashion10k, ", "or text:<path>"):
            datasets.load(name)
    with refused("cifar10 has no split 'val': use all, train or test"):
        datasets.load("cifar10", split="val")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULO_DATA", raising=False)
    for folder, size in (("data", 70), ("other", 80)):
        put(tmp_path / folder / "a.txt", bytes(size))
    assert len(datasets.load("text:a.txt")) == 70 - 64  # ./data
    monkeypatch.setenv("MULO_DATA", str(tmp_path / "other"))
    assert len(datasets.load("text:a.txt")) == 80 - 64
    assert len(datasets.load("text:a.txt", tmp_path / "data")) == 70 - 64  # the argument wins
