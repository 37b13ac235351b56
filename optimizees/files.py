"""The files that data sets are published in: reading them with suspicion, and fetching them.

Whatever is wrong with a file (missing, truncated, of the wrong layout or checksum, hostile) is one
sentence that names it. `data.load` turns what is read here into data sets; `download` is behind
`python tasks.py download NAME`, and nothing else ever touches the network.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import pickle
import struct
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from checkpoints import write_atomically

LM1B = "1-billion-word-language-modeling-benchmark-r13output"
LM1B_VOCABULARY = 32_000  # the paper's; ids of a tokenizer that is passed must be below

SHA256 = {  # of files as published; for a .gz, of what is inside, however it was compressed
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    "heldout-00000-of-00050": "265dccd51762253e20425c21ff6ddf09e6da2e11a365da399b0390eebb2d52c8",
}
MD5 = {  # of what `download` fetches, as published
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
TORONTO = "https://www.cs.toronto.edu/~kriz"
ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
DOWNLOADS = {  # name: (address, folder in data_dir, files)
    "cifar10": (TORONTO, "cifar10", ["cifar-10-binary.tar.gz"]),
    "cifar10-python": (TORONTO, "cifar10", ["cifar-10-python.tar.gz"]),
    "fashion": (ZALANDO, "fashion-mnist", [name for name in MD5 if "idx" in name]),
}
GET_CIFAR10 = (
    f"`python tasks.py download cifar10` gets {TORONTO}/cifar-10-binary.tar.gz (or partial=True)"
)
GET_IMAGENET = "unpack the downsampled npz files of https://image-net.org/download-images there"
GET_LM1B = f"unpack https://www.statmt.org/lm-benchmark/{LM1B}.tar.gz (or partial=True)"
SETS = {  # name: (its splits, where its files come from)
    "fashion10k": (["train"], "they are in the repository, run from a checkout of it"),
    "pixels": (["train"], "it is made of fashion10k"),
    "fashion": (["train", "test"], f"`python tasks.py download fashion` gets them from {ZALANDO}"),
    "cifar10": (["train", "test"], GET_CIFAR10),
    "imagenet32": (["train", "val"], GET_IMAGENET),
    "imagenet64": (["train", "val"], GET_IMAGENET),
    "lm1b": (["train", "heldout"], GET_LM1B),
    "teacher": (["train"], "it is procedural"),
    "text": (["train"], "it is any file of yours"),
}


def data_dir_or_default(data_dir: str | os.PathLike | None) -> Path:
    return Path(data_dir or os.environ.get("MULO_DATA") or "data").expanduser()


def _bad(path: Path | str, why: str, fix: str = "get it again") -> ValueError:
    return ValueError(f"{path} {why}: {fix}.")


def _present(name: str, folder: Path, files: list[str], partial: bool = False) -> list[Path]:
    """The paths of those files, which must all be there; with `partial`, at least one."""
    missing = [file for file in files if not (folder / file).is_file()]
    if missing and not (partial and len(missing) < len(files)):
        what = ", ".join(missing) if len(missing) < 11 else f"{missing[0]} to {missing[-1]}"
        raise FileNotFoundError(f"{name}: {folder} lacks {what}: {SETS[name][1]}.")
    return [folder / file for file in files if file not in missing]


def _check_content(path: Path, content: bytes, check: bool) -> None:
    known = SHA256.get(path.name.removesuffix(".gz").removeprefix("news.en."))
    if check and known and hashlib.sha256(content).hexdigest() != known:
        why = f"differs from the published file (its sha256 is not {known[:8]}...)"
        raise _bad(path, why, "get it again or pass check=False")


def _check_labels(
    path: Path, y: np.ndarray, low: int, high: int, fix: str = "get it again"
) -> np.ndarray:
    if y.ndim != 1 or not len(y) or y.dtype.kind not in "iu" or y.min() < low or y.max() > high:
        raise _bad(path, f"has no labels, or labels out of range {low}..{high}", fix)
    return y.astype(np.int64) - low


def _idx(path: Path, magic: int, check: bool) -> np.ndarray:
    """The uint8 array of a gzipped IDX file: magic, sizes (all big-endian int32), bytes."""
    n_sizes = magic & 0xFF
    try:
        with gzip.open(path) as file:
            head = file.read(4 + 4 * n_sizes)
            found, *sizes = struct.unpack(f">{1 + n_sizes}I", head)
            if found != magic:
                raise _bad(path, f"has magic number {found}, not {magic}")
            content = file.read(math.prod(sizes) + 1)
    except (EOFError, MemoryError, OverflowError, struct.error, zlib.error, OSError) as error:
        raise _bad(path, f"is truncated or not gzip ({error})") from error
    if len(content) != math.prod(sizes):
        raise _bad(path, f"does not hold the {sizes} bytes it announces")
    _check_content(path, head + content, check)
    return np.frombuffer(bytearray(content), np.uint8).reshape(sizes)


def read_fashion(
    name: str, folder: Path, prefix: str, check: bool
) -> tuple[np.ndarray, np.ndarray]:
    files = [f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"]
    x_path, y_path = _present(name, folder, files)
    x, y = _idx(x_path, 2051, check), _idx(y_path, 2049, check)
    if x.shape != (len(y), 28, 28):
        raise _bad(x_path, f"is {x.shape}, not {len(y)} images of 28x28")
    return x[:, None], _check_labels(y_path, y, 0, 9)


NUMPY_IN_PICKLES = ["numpy.ndarray", "numpy.dtype"]
NUMPY_IN_PICKLES += ["numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"]


class _Inert:
    """What a pickle gets for numpy's array and dtype: it keeps the state and does nothing."""

    def __init__(self, *args):
        self.state = None

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of plain values and arrays; whatever else it asks for is refused unrun."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, _: text.encode("latin1")
        if f"{module}.{name}" in NUMPY_IN_PICKLES:
            return _Inert
        raise ImportError(f"{module}.{name}")


def _check_records(path: Path, n: int, check: bool) -> None:
    if check and n != 10_000:
        raise _bad(path, f"has {n} records, not 10000", "get it again or pass check=False")


def _cifar_pickle(path: Path, check: bool) -> np.ndarray:
    """A batch of cifar-10-batches-py as the records of the binary version, (N, 3073) uint8."""
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        content = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        _, shape, _, fortran, raw = content["data"].state
        x = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
        y = np.array(content["labels"])
    except ImportError as error:
        raise _bad(path, f"asks for {error} and was not read, as it may run code") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise _bad(path, f"is not a CIFAR-10 batch ({error})") from error
    y = _check_labels(path, y, 0, 9)
    if x.shape != (len(y), 3072):
        raise _bad(path, f"has data {x.shape} for {len(y)} labels")
    _check_records(path, len(y), check)
    return np.concatenate([y[:, None].astype(np.uint8), x], 1)


def _cifar_binary(path: Path, check: bool) -> np.ndarray:
    """The records of a binary batch, (N, 3073) uint8: label, then 1024 bytes of R, of G, of B."""
    content = path.read_bytes()
    if len(content) % 3073:
        raise _bad(path, f"has {len(content)} bytes, not records of 3073")
    _check_content(path, content, check)
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    _check_records(path, len(records), check)
    _check_labels(path, records[:, 0], 0, 9)
    return records


def read_cifar10(
    folder: Path, split: str, partial: bool, check: bool
) -> tuple[np.ndarray, np.ndarray]:
    names = ["test_batch"] if split == "test" else [f"data_batch_{k}" for k in range(1, 6)]
    binary, python = folder / "cifar-10-batches-bin", folder / "cifar-10-batches-py"
    if python.is_dir() and not binary.is_dir():
        paths = _present("cifar10", python, names, partial)
        parts = [_cifar_pickle(path, check) for path in paths]
    else:
        paths = _present("cifar10", binary, [f"{name}.bin" for name in names], partial)
        parts = [_cifar_binary(path, check) for path in paths]
    records = np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _npz(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])
    except Exception as error:  # a damaged zip can raise anything
        raise _bad(path, f"has no readable array {name!r} ({error})") from error


def read_imagenet(name: str, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The images as a memory map of <split>_x.npy, made from the .npz files if it is not there."""
    side = int(name.removeprefix("imagenet"))
    x_path, y_path = folder / f"{split}_x.npy", folder / f"{split}_y.npy"
    if not x_path.is_file():
        batches = [f"train_data_batch_{k}.npz" for k in range(1, 11)]
        paths = _present(name, folder, batches if split == "train" else ["val_data.npz"])
        labels = [_check_labels(path, _npz(path, "labels"), 1, 1000) for path in paths]
        y = np.concatenate(labels)

        def write(file):  # one .npz in memory at a time
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(y), 3, side, side)}
            np.lib.format.write_array_header_1_0(file, header)
            for path, part in zip(tqdm(paths, f"converting {name}"), labels, strict=True):
                x = _npz(path, "data")
                if x.dtype != np.uint8 or x.shape != (len(part), 3 * side**2):
                    raise _bad(path, f"has {x.dtype} data {x.shape} for {len(part)} labels")
                file.write(np.ascontiguousarray(x))

        write_atomically(y_path, lambda file: np.save(file, y))
        write_atomically(x_path, write)  # last: when it is there, both are
    anew = f"delete {x_path.name} and {y_path.name}, so that they are made anew from the .npz files"

    def mapped(path: Path) -> np.ndarray:
        try:
            return np.lib.format.open_memmap(path, mode="c")  # "c": torch wants it writable
        except Exception as error:  # a damaged header can raise anything
            raise _bad(path, f"is damaged ({error})", anew) from error

    x, y = mapped(x_path), _check_labels(y_path, mapped(y_path), 0, 999, anew)
    if x.shape != (len(y), 3, side, side) or x.dtype != np.uint8:
        raise _bad(x_path, f"is {x.dtype} {x.shape} for {len(y)} labels", anew)
    return x, y


def _utf8(path: Path, check: bool = False) -> tuple[bytes, str]:
    content = path.read_bytes()
    _check_content(path, content, check)
    if not content:
        raise _bad(path, "is empty")
    try:
        return content, content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(path, f"is not UTF-8 text (byte {error.start})", "convert it") from None


def read_text(path: Path) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}: give text:<path of a UTF-8 text file>.")
    return torch.from_numpy(np.frombuffer(_utf8(path)[0], np.uint8).copy())


def read_lm1b(
    folder: Path, split: str, seq_len: int, tokenizer: Callable | None, partial: bool, check: bool
) -> tuple[np.ndarray, int]:
    """Rows of seq_len + 1 ids, cropped or padded with -1, and the size of the vocabulary.

    What sentencepiece makes is kept in a file, named after the model, seq_len and the files' names
    and sizes, and mapped.
    """
    if split == "train":
        texts, files = "training", [f"news.en-{k:05}-of-00100" for k in range(1, 100)]
    else:
        texts, files = "heldout", [f"news.en.heldout-{k:05}-of-00050" for k in range(50)]
    where = folder / LM1B / f"{texts}-monolingual.tokenized.shuffled"
    paths, classes, cache = _present("lm1b", where, files, partial), LM1B_VOCABULARY, None
    if tokenizer is None:
        tokenizer, classes, digest = _sentencepiece(folder)
        key = f"{digest} {seq_len} {[(path.name, path.stat().st_size) for path in paths]}"
        cache = folder / f"{split}_{hashlib.sha256(key.encode()).hexdigest()[:16]}.int32"

    def rows() -> Iterator[np.ndarray]:
        for path in tqdm(paths, "tokenizing lm1b"):
            for sentence in filter(str.strip, _utf8(path, check)[1].split("\n")):
                ids = list(tokenizer(sentence))[: seq_len + 1]
                if ids and not 0 <= min(ids) <= max(ids) < classes:
                    raise _bad(path, f"got token ids beyond {classes - 1}", "fix the tokenizer")
                yield np.array(ids + [-1] * (seq_len + 1 - len(ids)), np.int32)

    if cache is None:
        made = list(rows())
        if not made:
            raise _bad(where, "has files without a sentence")
        return np.stack(made), classes
    if not cache.is_file():
        write_atomically(cache, lambda file: file.writelines(rows()))
    n, rest = divmod(cache.stat().st_size, 4 * (seq_len + 1))
    if not n or rest:
        raise _bad(cache, "is empty or cut short", "delete it, so that it is made anew")
    return np.memmap(cache, np.int32, "c").reshape(n, seq_len + 1), classes


def _sentencepiece(folder: Path) -> tuple[Callable[[str], list[int]], int, str]:
    models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        fix = "put one sentencepiece model of 32,000 pieces there, or pass tokenizer="
        raise FileNotFoundError(f"lm1b: {folder} has {len(models)} files *.model: {fix}.")
    try:
        import sentencepiece
    except ImportError:
        fix = "`pip install sentencepiece`, or pass tokenizer="
        raise ImportError(f"{models[0]} needs sentencepiece: {fix}.") from None
    content = models[0].read_bytes()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise _bad(models[0], "is not a sentencepiece model") from error
    return model.encode, model.vocab_size(), hashlib.sha256(content).hexdigest()


def download(name: str, data_dir: str | os.PathLike | None = None, url: str | None = None) -> None:
    """Fetch a data set, check and unpack it; `url` is a mirror, the folder that holds its files.

    A transfer that stopped goes on where it was (`<file>.part`) when it is asked for again; a file
    that is there and has the published checksum is kept.
    """
    if name not in DOWNLOADS:
        how = SETS[name][1] if name in SETS else f"there are {', '.join(DOWNLOADS)}"
        raise ValueError(f"{name!r} is not for download: {how}.")
    address, folder, files = DOWNLOADS[name]
    folder = data_dir_or_default(data_dir) / folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / file for file in files):
        if not (path.is_file() and _md5(path) == MD5[path.name]):
            _fetch(f"{url or address}/{path.name}", path, MD5[path.name])
        if path.name.endswith(".tar.gz"):
            _unpack(path)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _fetch(url: str, path: Path, md5: str) -> None:
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    problem = None
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                have = 0  # the server sends the whole file
            length = response.headers.get("Content-Length", "")
            total = have + (int(length) if length.isdigit() else 0)
            bar = tqdm(desc=path.name, total=total or None, initial=have, unit="B", unit_scale=True)
            with open(part, "ab" if have else "wb") as file, bar:
                while block := response.read1(1 << 20):  # what has come, not a full block
                    file.write(block)
                    bar.update(len(block))
        if part.stat().st_size < total:
            problem = f"it stopped after {part.stat().st_size} of {total} bytes"
    except (OSError, http.client.HTTPException) as error:
        if not have or getattr(error, "code", None) != 416:  # 416: the part is the whole file
            problem = error
    if problem:
        raise OSError(f"{url}: {problem}: ask again, a transfer that stopped goes on.")
    if _md5(part) != md5:
        part.unlink()
        why = f"came with the wrong checksum (md5 is not {md5})"
        raise _bad(url, why, "it was deleted, ask again")
    os.replace(part, path)


def _unpack(path: Path) -> None:
    """Unpack a tar beside itself, file by file by rename; nothing can land outside its folder."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        try:
            with tarfile.open(path) as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            fix = "get it again"
            if getattr(error, "errno", None):  # the disk's fault, not the file's
                fix = "make room there, or choose another --data-dir"
            raise _bad(path, f"was not unpacked ({error})", fix) from error
        for file in (f for f in Path(temporary).rglob("*") if f.is_file()):
            to = path.parent / file.relative_to(temporary)
            to.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, to)
