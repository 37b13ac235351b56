"""Readers of published data files, and a downloader for some of them.

A file that is missing, truncated, malformed or hostile raises an error whose one sentence names it
and tells the fix. `datasets.load` makes data sets of the arrays read here. Only `download`
(`python tasks.py download NAME`) uses the network.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import math
import os
import pickle
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
LM1B_VOCABULARY = 32_000  # the paper's; a tokenizer that is passed must have ids below this

SHA256 = {  # of the published files; for .gz files, of their uncompressed content
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
MD5 = {  # of the files that `download` fetches, as published
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
TORONTO = "https://www.cs.toronto.edu/~kriz"
ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
DOWNLOADS = {  # name: (URL, folder in data_dir, files)
    "cifar10": (TORONTO, "cifar10", ["cifar-10-binary.tar.gz"]),
    "cifar10-python": (TORONTO, "cifar10", ["cifar-10-python.tar.gz"]),
    "fashion": (ZALANDO, "fashion-mnist", [name for name in MD5 if "idx" in name]),
}
GET_CIFAR10 = "`python tasks.py download cifar10` gets "
GET_CIFAR10 += f"{TORONTO}/cifar-10-binary.tar.gz (or pass partial=True)"
GET_IMAGENET = "unpack the downsampled npz files of https://image-net.org/download-images there"
GET_LM1B = f"unpack https://www.statmt.org/lm-benchmark/{LM1B}.tar.gz (or pass partial=True)"
SETS = {  # name: (what it calls its test split, how to get its files)
    "fashion10k": ("test", "they are in the repository, run from a checkout of it"),
    "pixels": ("test", "it is made from fashion10k"),
    "fashion": ("test", f"`python tasks.py download fashion` gets them from {ZALANDO}"),
    "cifar10": ("test", GET_CIFAR10),
    "cifar10k": ("test", GET_CIFAR10),
    "imagenet32": ("val", GET_IMAGENET),
    "imagenet64": ("val", GET_IMAGENET),
    "lm1b": ("heldout", GET_LM1B),
    "teacher": ("test", "it is procedural"),
    "text": ("test", "it is any text file of yours"),
}
AGAIN = "download it again"
Arrays = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) uint8, labels (N,) int64


def data_dir_or_default(data_dir: str | os.PathLike | None) -> Path:
    return Path(data_dir or os.environ.get("MULO_DATA") or "data").expanduser()


def _bad(path: Path | str, problem: str, fix: str = AGAIN) -> ValueError:
    return ValueError(f"{path} {problem}: {fix}.")


def _find(name: str, folder: Path, files: list[str], partial: bool = False) -> list[Path]:
    """Paths of these files, of which all must exist; with `partial`, at least one."""
    missing = [file for file in files if not (folder / file).is_file()]
    if missing and not (partial and len(missing) < len(files)):
        what = ", ".join(missing) if len(missing) < 11 else f"{missing[0]} to {missing[-1]}"
        raise FileNotFoundError(f"{name}: {folder} lacks {what}: {SETS[name][1]}.")
    return [folder / file for file in files if file not in missing]


def _check_sha256(path: Path, content: bytes) -> None:
    known = SHA256.get(path.name.removesuffix(".gz").removeprefix("news.en."))
    if known and hashlib.sha256(content).hexdigest() != known:
        problem = f"differs from the published file (its sha256 is not {known[:8]}...)"
        raise _bad(path, problem, f"{AGAIN} or pass check=False")


def _check_labels(path: Path, y: np.ndarray, low: int, high: int, fix: str = AGAIN) -> np.ndarray:
    """Check that y are labels low..high; return them as int64, starting at 0."""
    if y.ndim != 1 or not len(y) or y.dtype.kind not in "iu" or y.min() < low or y.max() > high:
        raise _bad(path, f"has no labels, or labels out of range {low}..{high}", fix)
    return y.astype(np.int64) - low


def _check_images(path: Path, x: np.ndarray, shape: tuple, fix: str = AGAIN) -> np.ndarray:
    """Check that x are uint8 images of this shape; its first size is the number of labels."""
    if x.dtype != np.uint8 or x.shape != shape:
        problem = f"has {x.dtype} images {x.shape} for {shape[0]} labels, not uint8 {shape}"
        raise _bad(path, problem, fix)
    return x


def _read_idx(path: Path, magic: int, check: bool) -> np.ndarray:
    """The uint8 array of a gzipped IDX file: magic number, sizes (big-endian int32), bytes."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (EOFError, zlib.error, OSError) as error:
        raise _bad(path, f"is truncated or not gzip ({error})") from error
    start = 4 + 4 * (magic & 0xFF)  # the last byte of the magic number is the number of axes
    found, *sizes = np.frombuffer(content[:start].ljust(start, b"\0"), ">u4").tolist()
    if found != magic:
        raise _bad(path, f"has magic number {found}, not {magic}")
    if len(content) != start + math.prod(sizes):
        raise _bad(path, f"does not hold as many bytes as its sizes {sizes} say")
    if check:
        _check_sha256(path, content)
    return np.frombuffer(bytearray(content[start:]), np.uint8).reshape(sizes)


def read_fashion(name: str, folder: Path, prefix: str, check: bool) -> Arrays:
    files = [f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"]
    x_path, y_path = _find(name, folder, files)
    x, y = _read_idx(x_path, 2051, check), _read_idx(y_path, 2049, check)
    x = _check_images(x_path, x, (len(y), 28, 28))
    return x[:, None], _check_labels(y_path, y, 0, 9)


ARRAY_PARTS = ("numpy.ndarray", "numpy.dtype")
ARRAY_PARTS += ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")


class _RawArray:
    """Stands for numpy's array and dtype in a pickle: stores the pickled state, runs nothing."""

    def __init__(self, *args):
        self.state = None

    def __setstate__(self, state):
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads plain values and arrays; refuses any other class or function without calling it."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("_codecs", "encode"):  # how Python 3 pickles bytes for Python 2
            return lambda text, _: text.encode("latin1")
        if f"{module}.{name}" in ARRAY_PARTS:
            return _RawArray
        raise ImportError(f"{module}.{name}")


def _parse_cifar_pickle(path: Path, content: bytes) -> Arrays:
    """A file of cifar-10-batches-py: images (N, 3072) and labels (N,)."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        batch = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        _, shape, _, fortran, raw = batch["data"].state
        x = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
        return x, np.array(batch["labels"])
    except ImportError as error:
        raise _bad(path, f"asks for {error} and was not read, as it may run code") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise _bad(path, f"is not a CIFAR-10 batch ({error})") from error


def _parse_cifar_binary(path: Path, content: bytes) -> Arrays:
    """A file of cifar-10-batches-bin: records of a label and 1024 bytes each of R, G and B."""
    if len(content) % 3073:
        raise _bad(path, f"has {len(content)} bytes, not records of 3073")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return records[:, 1:], records[:, 0]


def read_cifar10(folder: Path, split: str, parts: int, partial: bool, check: bool) -> Arrays:
    """The test images, or the first `parts` of the five files of training images."""
    files = ["test_batch"] if split == "test" else [f"data_batch_{k + 1}" for k in range(parts)]
    parse, where = _parse_cifar_pickle, folder / "cifar-10-batches-py"
    if (folder / "cifar-10-batches-bin").is_dir() or not where.is_dir():
        parse, where = _parse_cifar_binary, folder / "cifar-10-batches-bin"
        files = [f"{file}.bin" for file in files]
    batches = []
    for path in _find("cifar10", where, files, partial):
        content = path.read_bytes()
        x, y = parse(path, content)
        if check:
            _check_sha256(path, content)
        y = _check_labels(path, y, 0, 9)
        batches.append((_check_images(path, x, (len(y), 3072)), y))
        if check and len(y) != 10_000:
            raise _bad(path, f"has {len(y)} images, not 10000", f"{AGAIN} or pass check=False")
    x, y = map(np.concatenate, zip(*batches, strict=True))
    return x.reshape(-1, 3, 32, 32), y


def _read_npz(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])
    except Exception as error:  # a damaged zip can raise anything
        raise _bad(path, f"has no readable array {name!r} ({error})") from error


def _convert_imagenet(name: str, paths: list[Path], x_path: Path, y_path: Path, side: int) -> None:
    """Write the images and labels of the published .npz files as two .npy files."""
    labels = [_check_labels(path, _read_npz(path, "labels"), 1, 1000) for path in paths]
    y = np.concatenate(labels)

    def write_images(file):  # with one .npz in memory at a time
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(y), 3, side, side)}
        np.lib.format.write_array_header_1_0(file, header)
        for path, part in zip(tqdm(paths, f"converting {name}"), labels, strict=True):
            x = _check_images(path, _read_npz(path, "data"), (len(part), 3 * side**2))
            file.write(np.ascontiguousarray(x))

    write_atomically(y_path, lambda file: np.save(file, y))
    write_atomically(x_path, write_images)  # last: if it exists, both do


def read_imagenet(name: str, folder: Path, split: str) -> Arrays:
    """Memory-map <split>_x.npy, which is made from the .npz files at first use."""
    side = int(name.removeprefix("imagenet"))
    x_path, y_path = folder / f"{split}_x.npy", folder / f"{split}_y.npy"
    if not x_path.is_file():
        batches = [f"train_data_batch_{k}.npz" for k in range(1, 11)]
        paths = _find(name, folder, batches if split == "train" else ["val_data.npz"])
        _convert_imagenet(name, paths, x_path, y_path, side)
    fix = f"delete {x_path.name} and {y_path.name}, to convert the .npz files again"
    arrays = []
    for path in (x_path, y_path):
        try:
            arrays.append(np.lib.format.open_memmap(path, mode="c"))  # torch wants it writable
        except Exception as error:  # a damaged header can raise anything
            raise _bad(path, f"is damaged ({error})", fix) from error
    y = _check_labels(y_path, arrays[1], 0, 999, fix)
    return _check_images(x_path, arrays[0], (len(y), 3, side, side), fix), y


def _read_utf8(path: Path, check: bool) -> str:
    content = path.read_bytes()
    if check:
        _check_sha256(path, content)
    if not content:
        raise _bad(path, "is empty", "get it again")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _bad(path, f"is not UTF-8 text (byte {error.start})", "convert it") from None


def read_text(path: Path) -> Tensor:
    """The bytes of a UTF-8 file, (T,) uint8."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {str(path)!r}: give text:<path of a UTF-8 text file>.")
    return torch.frombuffer(bytearray(_read_utf8(path, False).encode()), dtype=torch.uint8)


def read_lm1b(
    folder: Path, split: str, seq_len: int, tokenizer: Callable | None, partial: bool, check: bool
) -> tuple[np.ndarray, int]:
    """Sentences as rows of seq_len + 1 ids, cropped or padded with -1; and the vocabulary size.

    The output of sentencepiece is cached in a file, which is memory-mapped. Its name depends on the
    model, seq_len, and the names and sizes of the text files. That of `tokenizer` is not cached.
    """
    part, files = "training", [f"news.en-{k:05}-of-00100" for k in range(1, 100)]
    if split == "heldout":
        part, files = "heldout", [f"news.en.heldout-{k:05}-of-00050" for k in range(50)]
    texts = folder / LM1B / f"{part}-monolingual.tokenized.shuffled"
    paths, classes, cache = _find("lm1b", texts, files, partial), LM1B_VOCABULARY, None
    if tokenizer is None:
        tokenizer, classes, digest = _sentencepiece(folder)
        key = f"{digest} {seq_len} {[(path.name, path.stat().st_size) for path in paths]}"
        cache = folder / f"{split}_{hashlib.sha256(key.encode()).hexdigest()[:16]}.int32"

    def rows() -> Iterator[np.ndarray]:
        for path in tqdm(paths, "tokenizing lm1b"):
            for sentence in filter(str.strip, _read_utf8(path, check).split("\n")):
                ids = list(tokenizer(sentence))[: seq_len + 1]
                if ids and not 0 <= min(ids) <= max(ids) < classes:
                    raise _bad(path, f"got token ids outside 0..{classes - 1}", "fix the tokenizer")
                yield np.array(ids + [-1] * (seq_len + 1 - len(ids)), np.int32)

    if cache is None:
        sentences = list(rows())
        if not sentences:
            raise _bad(texts, "has no sentences in its files")
        return np.stack(sentences), classes
    if not cache.is_file():
        write_atomically(cache, lambda file: file.writelines(rows()))
    n, rest = divmod(cache.stat().st_size, 4 * (seq_len + 1))
    if not n or rest:
        raise _bad(cache, "is empty or truncated", "delete it, to tokenize again")
    return np.memmap(cache, np.int32, "c").reshape(n, seq_len + 1), classes


def _sentencepiece(folder: Path) -> tuple[Callable[[str], list[int]], int, str]:
    """The encoder of the one *.model in the folder, its vocabulary size and its SHA-256."""
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
        raise _bad(models[0], "is not a sentencepiece model", "use another") from error
    return model.encode, model.vocab_size(), hashlib.sha256(content).hexdigest()


def download(name: str, data_dir: str | os.PathLike | None = None, url: str | None = None) -> None:
    """Download a data set, check it and unpack it; `url` replaces the published URL (a mirror).

    An interrupted download is kept as `<file>.part` and resumed by the next call. A file that
    already has the published checksum is not downloaded again.
    """
    if name not in DOWNLOADS:
        how = SETS[name][1] if name in SETS else f"there are {', '.join(DOWNLOADS)}"
        raise ValueError(f"{name!r} cannot be downloaded from here: {how}.")
    published, folder, files = DOWNLOADS[name]
    folder = data_dir_or_default(data_dir) / folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / file for file in files):
        if not (path.is_file() and _md5(path) == MD5[path.name]):
            _fetch(f"{url or published}/{path.name}", path, MD5[path.name])
        if path.name.endswith(".tar.gz"):
            _unpack(path)


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _fetch(url: str, path: Path, md5: str) -> None:
    """Download to <path>.part, from where it stopped before; check the MD5; rename."""
    part = path.with_name(path.name + ".part")
    start = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                start = 0  # the server sends the whole file
            length = response.headers.get("Content-Length", "")
            total = start + (int(length) if length.isdigit() else 0)
            bar = tqdm(
                desc=path.name, total=total or None, initial=start, unit="B", unit_scale=True
            )
            with open(part, "ab" if start else "wb") as file, bar:
                while block := response.read1(1 << 20):  # as it arrives, so that little is lost
                    file.write(block)
                    bar.update(len(block))
        if part.stat().st_size < total:
            raise OSError(f"stopped after {part.stat().st_size} of {total} bytes")
    except (OSError, http.client.HTTPException) as error:
        if not start or getattr(error, "code", None) != 416:  # 416: the .part is already complete
            raise OSError(f"{url}: {error}: try again, it resumes where it stopped.") from error
    if _md5(part) != md5:
        part.unlink()
        problem = f"has the wrong checksum (its md5 is not {md5})"
        raise _bad(url, problem, "the download was deleted, try again")
    os.replace(part, path)


def _unpack(path: Path) -> None:
    """Unpack a tar file into its own folder, each file by rename; none can land outside."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        try:
            with tarfile.open(path) as tar:
                tar.extractall(temporary, filter="data")
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            disk = getattr(error, "errno", None)  # set if the disk failed, not the archive
            fix = "make room there, or choose another --data-dir" if disk else AGAIN
            raise _bad(path, f"was not unpacked ({error})", fix) from error
        for file in (f for f in Path(temporary).rglob("*") if f.is_file()):
            target = path.parent / file.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)
