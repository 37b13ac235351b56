"""Readers of text: UTF-8 files, and LM1B tokenized once."""

import hashlib
import io
import sys
from pathlib import Path

import pytest
from data_files import put, real, refused, seed

from optimizees import datasets, files

TEXTS = f"lm1b/{files.LM1B}"


# Any text, as bytes


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
        datasets.load(f"text:{path}")
    with pytest.raises(FileNotFoundError, match=r"no file .*nothing.txt"):
        datasets.load(f"text:{tmp_path / 'nothing.txt'}")


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
    d = datasets.load(f"text:{path}", seq_len=32)
    assert len(d) == len(content) - 32
    tokens, targets, _ = d.batch(seed(), 8)
    assert bytes([*tokens[0].tolist(), targets[0, -1].item()]) in content


# LM1B


def by_letter(sentence: str) -> list[int]:
    return [ord(c) for c in sentence]


def lm1b(root: Path, *texts: str, split: str = "train") -> None:
    names = {"train": ("training", "news.en-{:05}-of-00100", 1)}
    names["heldout"] = ("heldout", "news.en.heldout-{:05}-of-00050", 0)
    folder, name, first = names[split]
    for k, text in enumerate(texts):
        path = root / TEXTS / f"{folder}-monolingual.tokenized.shuffled" / name.format(first + k)
        put(path, text.encode())


def load_lm1b(root: Path, **kwargs) -> datasets.Tokens:
    kwargs = {"tokenizer": by_letter, "partial": True, "check": False} | kwargs
    return datasets.load("lm1b", root, **kwargs)


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
