"""Readers of published data files. Nothing is downloaded: a missing file raises an error that says
where to get it, an incomplete one an error that names it."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mulo.checkpoints import write_atomically

CIFAR10_BYTES = 30_730_000  # of each file
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
HOW_TO_GET = {
    "fashion10k": "they are in the repository, run from a checkout of it",
    "cifar10": "unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz there",
    "imagenet": "unpack the downsampled npz files of https://image-net.org/download-images there",
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


def read_fashion(folder: Path) -> Arrays:
    """Fashion-MNIST's test data, from IDX files: a header of 16 or 8 bytes, then the array."""
    names = ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    arrays = []
    for path, header in zip(find("fashion10k", folder, names), (16, 8), strict=True):
        try:
            content = gzip.decompress(path.read_bytes())  # checks its CRC
        except (EOFError, zlib.error, OSError) as error:
            raise ValueError(f"{path} is damaged ({error}): get it again.") from error
        arrays.append(np.frombuffer(bytearray(content), np.uint8, offset=header))
    return arrays[0].reshape(-1, 1, 28, 28), arrays[1].astype(np.int64)


def read_cifar10(folder: Path, test: bool, parts: int) -> Arrays:
    """From the test file, or the first `parts` training files: a label, 1024 bytes R, G and B."""
    names = ["test_batch.bin"] if test else [f"data_batch_{k + 1}.bin" for k in range(parts)]
    paths = find("cifar10", folder, [f"cifar-10-batches-bin/{name}" for name in names])
    for path in paths:
        if path.stat().st_size != CIFAR10_BYTES:
            raise ValueError(f"{path} is incomplete: get it again.")
    records = np.concatenate([np.fromfile(path, np.uint8) for path in paths]).reshape(-1, 3073)
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


def read_imagenet(folder: Path, side: int, test: bool) -> Arrays:
    """Images, memory-mapped from a file that is converted from the .npz files at first use."""
    split, names = "train", [f"train_data_batch_{k}.npz" for k in range(1, 11)]
    if test:
        split, names = "val", ["val_data.npz"]
    x_path, y_path = folder / f"{split}_x.uint8", folder / f"{split}_y.npy"
    if not (x_path.is_file() and y_path.is_file()):
        paths, labels = find("imagenet", folder, names), []

        def write_images(file) -> None:  # with one .npz in memory at a time
            for path in tqdm(paths, f"converting {folder.name}"):
                x, y = _read_npz(path, side)
                file.write(np.ascontiguousarray(x))
                labels.append(y)

        write_atomically(x_path, write_images)
        write_atomically(y_path, lambda file: np.save(file, np.concatenate(labels)))
    x = np.memmap(x_path, np.uint8, "c")  # "c": torch requires writable memory
    return x.reshape(-1, 3, side, side), np.load(y_path)


def read_lm1b(folder: Path, test: bool, seq_len: int) -> tuple[np.ndarray, int]:
    """Sentences as rows of seq_len + 1 ids, cropped or padded with -1; and the vocabulary size.

    The sentencepiece *.model in the folder tokenizes them at first use, into a file that is
    memory-mapped.
    """
    import sentencepiece

    part, names = "training", [f"news.en-{k:05}-of-00100" for k in range(1, 100)]
    if test:
        part, names = "heldout", [f"news.en.heldout-{k:05}-of-00050" for k in range(50)]
    inner = f"{LM1B}/{part}-monolingual.tokenized.shuffled"
    paths = find("lm1b", folder, [f"{inner}/{name}" for name in names])
    models = list(folder.glob("*.model"))
    if len(models) != 1:
        fix = "put one sentencepiece model of 32,000 pieces there"
        raise FileNotFoundError(f"lm1b: {folder} has {len(models)} files *.model: {fix}.")
    content = models[0].read_bytes()
    model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def rows() -> Iterator[np.ndarray]:
        for path in tqdm(paths, "tokenizing lm1b"):
            for sentence in path.read_bytes().decode(errors="replace").split("\n"):
                if sentence.strip():
                    ids = model.encode(sentence)[: seq_len + 1]
                    yield np.array(ids + [-1] * (seq_len + 1 - len(ids)), np.int32)

    cache = folder / f"{part}_{seq_len}_{hashlib.sha256(content).hexdigest()[:16]}.int32"
    if not cache.is_file():
        write_atomically(cache, lambda file: file.writelines(rows()))
    return np.memmap(cache, np.int32, "c").reshape(-1, seq_len + 1), model.vocab_size()
