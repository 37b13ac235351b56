"""Readers of published data files, and a downloader for some of them.

A file that is missing, incomplete or not the published one raises an error that names it and the
fix. Only `python tasks.py download NAME` uses the network.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mulo.checkpoints import write_atomically

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
}
ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
DOWNLOADS = {  # name: folder in data_dir, URLs
    "cifar10": ("cifar10", ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]),
    "fashion": ("fashion-mnist", [f"{ZALANDO}/{k}.gz" for k in SHA256 if "idx" in k]),
}
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
GET_IMAGENET = "unpack the downsampled npz files of https://image-net.org/download-images there"
HOW_TO_GET = {
    "fashion10k": "they are in the repository, run from a checkout of it",
    "fashion": "`python tasks.py download fashion` gets them",
    "cifar10": "`python tasks.py download cifar10` gets them",
    "imagenet32": GET_IMAGENET,
    "imagenet64": GET_IMAGENET,
    "lm1b": f"unpack https://www.statmt.org/lm-benchmark/{LM1B}.tar.gz there",
    "text": "put any text there, or give text:<path>",
}
Arrays = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) uint8, labels (N,) int64


def data_dir_or_default(data_dir: str | os.PathLike | None) -> Path:
    return Path(data_dir or os.environ.get("MULO_DATA") or "data").expanduser()


def find(name: str, folder: Path, files: list[str]) -> list[Path]:
    """Paths of these files of the data set `name`; all must exist."""
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        names = ", ".join(missing) if len(missing) < 11 else f"{missing[0]} to {missing[-1]}"
        raise FileNotFoundError(f"{name}: {folder} lacks {names}: {HOW_TO_GET[name]}.")
    return [folder / file for file in files]


def _read(path: Path) -> bytearray:
    """The content of a file, uncompressed, if it is the published one."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): get it again.") from error
    sha256 = SHA256[path.name.removesuffix(".gz")]
    if hashlib.sha256(content).hexdigest() != sha256:
        problem = f"is not the published file (its sha256 is not {sha256[:8]}...)"
        raise ValueError(f"{path} {problem}: get it again.")
    return bytearray(content)  # writable, as torch requires


def read_fashion(name: str, folder: Path, test: bool) -> Arrays:
    """From IDX files: a header of 4 bytes, 4 bytes for each axis, then the array."""
    part = "t10k" if test else "train"
    files = [f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"]
    x, y = map(_read, find(name, folder, files))
    x = np.frombuffer(x, np.uint8, offset=16).reshape(-1, 1, 28, 28)
    return x, np.frombuffer(y, np.uint8, offset=8).astype(np.int64)


def read_cifar10(folder: Path, test: bool, parts: int) -> Arrays:
    """From the test file, or the first `parts` training files: a label, 1024 bytes R, G and B."""
    files = ["test_batch.bin"] if test else [f"data_batch_{k + 1}.bin" for k in range(parts)]
    paths = find("cifar10", folder / "cifar-10-batches-bin", files)
    records = np.concatenate([np.frombuffer(_read(path), np.uint8) for path in paths])
    records = records.reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _read_npz(path: Path, side: int) -> Arrays:
    """Images (N, 3 side^2) and labels 0..999 of a file of downsampled ImageNet."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["data"], arrays["labels"].astype(np.int64) - 1
    except Exception as error:  # a damaged zip can raise anything
        raise ValueError(f"{path} is damaged ({error}): get it again.") from error
    if x.dtype != np.uint8 or x.shape != (len(y), 3 * side**2) or y.min() < 0 or y.max() > 999:
        raise ValueError(f"{path} has no {side}x{side} images of 1,000 classes: get it again.")
    return x, y


def read_imagenet(name: str, folder: Path, test: bool) -> Arrays:
    """Images, memory-mapped from a file that is converted from the .npz files at first use."""
    side, split = int(name.removeprefix("imagenet")), "val" if test else "train"
    x_path, y_path = folder / f"{split}_x.uint8", folder / f"{split}_y.npy"
    if not (x_path.is_file() and y_path.is_file()):
        files = [f"train_data_batch_{k}.npz" for k in range(1, 11)]
        paths, labels = find(name, folder, ["val_data.npz"] if test else files), []

        def write_images(file) -> None:  # with one .npz in memory at a time
            for path in tqdm(paths, f"converting {name}"):
                x, y = _read_npz(path, side)
                file.write(np.ascontiguousarray(x))
                labels.append(y)

        write_atomically(x_path, write_images)
        write_atomically(y_path, lambda file: np.save(file, np.concatenate(labels)))
    x, y = np.memmap(x_path, np.uint8, "c"), np.load(y_path)  # "c": torch requires writable memory
    if len(x) != len(y) * 3 * side**2:
        raise ValueError(f"{x_path} is damaged: delete it, to convert the .npz files again.")
    return x.reshape(-1, 3, side, side), y


def read_lm1b(folder: Path, test: bool, seq_len: int) -> tuple[np.ndarray, int]:
    """Sentences as rows of seq_len + 1 ids, cropped or padded with -1; and the vocabulary size.

    The sentencepiece *.model in the folder tokenizes them at first use, into a file that is
    memory-mapped.
    """
    part, files = "training", [f"news.en-{k:05}-of-00100" for k in range(1, 100)]
    if test:
        part, files = "heldout", [f"news.en.heldout-{k:05}-of-00050" for k in range(50)]
    paths = find("lm1b", folder / LM1B / f"{part}-monolingual.tokenized.shuffled", files)
    models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        fix = "put one sentencepiece model of 32,000 pieces there"
        raise FileNotFoundError(f"lm1b: {folder} has {len(models)} files *.model: {fix}.")
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(f"{models[0]} needs sentencepiece: pip install sentencepiece.") from None
    content = models[0].read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def rows() -> Iterator[np.ndarray]:
        for path in tqdm(paths, "tokenizing lm1b"):
            *sentences, rest = path.read_bytes().decode(errors="replace").split("\n")
            if rest:
                raise ValueError(f"{path} ends within a sentence: get it again.")
            for sentence in filter(str.strip, sentences):
                ids = model.encode(sentence)[: seq_len + 1]
                yield np.array(ids + [-1] * (seq_len + 1 - len(ids)), np.int32)

    cache = folder / f"{part}_{seq_len}_{hashlib.sha256(content).hexdigest()[:16]}.int32"
    if not cache.is_file():
        write_atomically(cache, lambda file: file.writelines(rows()))
    return np.memmap(cache, np.int32, "c").reshape(-1, seq_len + 1), model.vocab_size()


def download(name: str, data_dir: str | os.PathLike | None = None) -> None:
    """Download a data set and unpack it. Its files are checked when they are read."""
    if name not in DOWNLOADS:
        fix = HOW_TO_GET.get(name, f"use {' or '.join(DOWNLOADS)}")
        raise ValueError(f"{name!r} cannot be downloaded from here: {fix}.")
    folder, urls = DOWNLOADS[name]
    folder = data_dir_or_default(data_dir) / folder
    folder.mkdir(parents=True, exist_ok=True)
    for url in urls:
        file = Path(url).name
        try:
            with (
                urllib.request.urlopen(url, timeout=60) as response,
                tqdm.wrapattr(response, "read", total=response.length, desc=file) as stream,
            ):
                if file.endswith(".tar.gz"):
                    with tarfile.open(fileobj=stream, mode="r|gz") as tar:
                        tar.extractall(folder, filter="data")  # writes only to `folder`
                else:
                    write_atomically(folder / file, stream.read())
        except Exception as error:  # a broken connection can raise anything
            raise OSError(f"{url}: {error}: try again.") from error
