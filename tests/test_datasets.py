"""Data sets in memory: batches by seed, pooling, windows of text, the teacher; their names."""

import math
import pickle

import pytest
import torch
from data_files import lm1b, put, refused, seed

from optimizees import datasets

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
        "tokens": lambda: datasets.Tokens(torch.arange(100), 100, 5),
        "rows": lambda: datasets.Tokens(rows, 9, 5),
        "teacher": datasets.Teacher,
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
    several = a.batch([seed(4), seed(5)], 7)  # as from each alone
    for together, *alone in zip(several, a.batch(seed(4), 7), a.batch(seed(5), 7), strict=True):
        assert torch.equal(together, torch.stack(alone))


def test_particles_have_their_own_data():
    x, y = images().batch(seed(), 16, particles=4)
    assert x.shape == (4, 16, 3, 4, 4)
    assert y.shape == (4, 16)
    assert not torch.equal(x[0], x[1])
    flat, _ = images().batch(seed(), 64)
    assert torch.equal(x.flatten(0, 1), flat)


def test_buffers_are_reused_only_when_free():
    """Batches keep their values as long as they, their views, arrays or graphs are alive."""
    d = images(50)
    held = [d.batch(seed(), 6)[0] for _ in range(5)]
    view, array, saved = (d.batch(seed(), 6)[0] for _ in range(3))
    view, array = view[2:, :, 1], array.numpy()
    w = torch.ones(4, requires_grad=True)
    loss = (saved * w).sum()
    grad = saved.sum((0, 1, 2))
    copies = [x.clone() for x in (*held, view, torch.from_numpy(array))]
    del saved
    addresses, x = [], None
    for _ in range(20):
        x, _ = d.batch(seed(1), 6)  # the previous batch is freed after this one is drawn
        addresses.append(x.data_ptr())
    assert len(set(addresses[:2])) == 2
    assert set(addresses[2:]) == set(addresses[:2])
    for x, copy in zip((*held, view, torch.from_numpy(array)), copies, strict=True):
        assert torch.equal(x, copy)
    loss.backward()
    torch.testing.assert_close(w.grad, grad)
    again = pickle.loads(pickle.dumps(d))
    assert torch.equal(again.batch(seed(2), 6)[0], d.batch(seed(2), 6)[0])


def test_what_does_not_fit_stays_and_batches_move(monkeypatch):
    monkeypatch.setattr(datasets, "_place", lambda x, device: x)
    d = images(device="meta")  # stands for a device that is too small
    assert d.x.device.type == "cpu"
    x, y = d.batch(seed(), 6, 2)
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
    assert d.pool(1).x.item() == round((255 + sum(range(1, 16))) / 16)
    assert d.pool(2).x.dtype == torch.uint8
    assert torch.equal(d.pool(4).x, x)
    # 4 -> 3: windows of adaptive pooling are [0, 2), [1, 3), [2, 4)
    rows = [(0, 2), (1, 3), (2, 4)]
    by_hand = [[x[0, 0, a:b, c:e].float().mean().round().item() for c, e in rows] for a, b in rows]
    assert d.pool(3).x[0, 0].tolist() == by_hand
    for size in (0, 5):
        with refused("cannot pool", f"size={size}: use 1 to 4"):
            d.pool(size)


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
    put(tmp_path / "some.txt", bytes(range(125)) * 8)
    for name, field, n in (
        ("fashion10k", "x", 8000), ("fashion10k", "y", 8000), ("pixels", "data", 8000),
        ("text:some.txt", "data", 900),
    ):  # fmt: skip
        default, *parts = (
            getattr(datasets.load(name, tmp_path, **how), field)
            for how in ({}, {"split": "all"}, {"split": "train"}, {"split": "test"})
        )
        assert torch.equal(default, parts[0])
        assert torch.equal(default[:n], parts[1])
        assert torch.equal(default[n:], parts[2])
    classes = torch.bincount(datasets.load(split="test").y)
    assert (classes.min(), classes.max()) == (173, 224)  # no class is missing
    assert datasets.load("teacher", split="test").seed == datasets.load("teacher").seed


def test_splits_of_sets_with_test_files(tmp_path):
    lm1b(tmp_path, "some words\n")
    lm1b(tmp_path, "held\n", "out\n", split="heldout")
    how = {"tokenizer": str.encode, "seq_len": 4, "partial": True, "check": False}
    sizes = [len(datasets.load("lm1b", tmp_path, split=split, **how))
             for split in ("all", "train", "test", "heldout")]  # fmt: skip
    assert sizes == [1, 1, 2, 2]


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
    text = torch.arange(20)
    d = datasets.Tokens(text, 20, 6)
    assert len(d) == 14
    tokens, targets, mask = d.batch(seed(), 500)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert mask.dtype == torch.bool
    assert mask.all()
    assert (tokens[:, 0].min(), targets[:, -1].max()) == (0, 19)  # both ends can be reached
    with refused("seq_len=6 needs 7 tokens, not 6: make it 5 or less, or give a longer text"):
        datasets.Tokens(torch.arange(6), 20, 6)
    with refused("seq_len=3 needs 4 tokens, not 5: make it 4"):
        datasets.Tokens(torch.zeros(2, 5).int(), 20, 3)


def test_mask_is_false_where_the_target_is_padding():
    rows = torch.tensor([[5, 0, 7, -1, -1], [1, -1, -1, -1, -1], [1, 2, 3, 4, 5]])
    tokens, targets, mask = datasets.Tokens(rows, 8, 4).batch(seed(), 100)
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
    d = datasets.load(f"text:{path}", seq_len=16)
    assert d.classes == 256
    tokens, targets, mask = d.batch(seed(), 4, particles=3)
    assert tokens.shape == (3, 4, 16)
    assert mask.all()
    for a, b in zip(tokens.view(-1, 16), targets.view(-1, 16), strict=True):
        assert bytes([*a.tolist(), b[-1].item()]) in content


# The teacher


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
    assert loss == pytest.approx(t.floor(50_000), abs=0.015)
    assert 0.2 < t.floor(10_000) < math.log(5) - 0.2


def test_teacher_is_made_by_its_seed_and_temperature():
    x = torch.randn(3, 64, generator=seed())
    a, b = datasets.Teacher(seed=1), datasets.load("teacher")
    assert torch.equal(a.log_probs(x), datasets.Teacher(seed=1).log_probs(x))
    assert not torch.equal(a.log_probs(x), b.log_probs(x))
    assert (b.dim, b.classes, b.shape) == (64, 10, (64,))
    cold, flat = datasets.Teacher(temperature=50.0), datasets.Teacher(temperature=0.0)
    assert cold.floor(5000) < b.floor(5000) < flat.floor(5000)
    assert flat.floor(100) == pytest.approx(math.log(10), rel=1e-5)
    first, second = b.batch(g := seed(), 8)[0], b.batch(g, 8)[0]
    assert not torch.equal(first, second)  # never the same examples


# Names and folders


def test_names_splits_and_folders(tmp_path, monkeypatch):
    with refused("unknown data set 'cifar': did you mean 'cifar10'?", "text:<path>"):
        datasets.load("cifar")
    for name in ("text", "text:", "cifar10:x"):
        with refused(f"unknown data set {name!r}"):
            datasets.load(name)
    with refused("cifar10 has no split 'val': use all, train or test"):
        datasets.load("cifar10", split="val")
    with refused("size=8 is for images, but teacher has none"):
        datasets.load("teacher", size=8)
    with refused("seq_len=60 pixels are not a square image: use 64"):
        datasets.load("pixels", seq_len=60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MULO_DATA", raising=False)
    for folder, size in (("data", 70), ("other", 80)):
        put(tmp_path / folder / "some.txt", bytes(size))
    assert len(datasets.load("text:some.txt")) == 70 - 64  # ./data
    monkeypatch.setenv("MULO_DATA", str(tmp_path / "other"))
    assert len(datasets.load("text:some.txt")) == 80 - 64
    assert len(datasets.load("text:some.txt", tmp_path / "data")) == 70 - 64  # the argument wins


def test_teachers_of_other_sizes():
    """By name; each has weights of its own, and the plain one is as before."""
    for name, sizes in datasets.TEACHERS.items():
        teacher = datasets.load(f"teacher{name}")
        assert (teacher.shape, teacher.classes) == ((sizes["dim"],), sizes["classes"])
        assert teacher.floor(2000) < 0.9 * math.log(sizes["classes"])  # there is much to learn
    assert len({sizes["seed"] for sizes in datasets.TEACHERS.values()} | {0}) == 9
    assert datasets.load("teacher").dim == 64
    with pytest.raises(ValueError, match="unknown data set 'teacher7'"):
        datasets.load("teacher7")
