"""The files learned optimizers live in: ours, and importers of others' weights.

    lo = load("mulo_m"); save(lo, "mine.pt", seed=0)

One small file holds format version, config and weights, and nothing that could run code.
Re-exported by `mulo`, which is where users meet these functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from features import Phi
from mulo import LO, LOConfig, SmallFC, VeLO

FORMAT, VERSION = "mulo", 1
SHIPPED = Path(__file__).parent / "weights"


def write_atomically(path: str | os.PathLike, content: str | bytes | Callable) -> None:
    """Write text, bytes, or what content(file) writes, under another name; then rename to path."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} for {path.name}: make it first.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(lo: LO, path: str | os.PathLike, **about) -> None:
    """Write a learned optimizer to a file, with `about`: plain values such as a command, a seed."""
    weights = {name: w.detach().float().cpu().clone() for name, w in lo.named_parameters()}
    config = dataclasses.asdict(lo.config)
    content = {"format": FORMAT, "version": VERSION, "about": about, "config": config}
    content |= {"weights": weights, "sha256": _digest(config, weights)}
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # what cannot be pickled, or read back, has no end of names
        raise TypeError(f"`about` takes plain numbers and strings, not {about!r}.") from error
    write_atomically(path, buffer.getvalue())


def find(name: str | os.PathLike) -> Path:
    """The file of a learned optimizer: by path, or by the name of a shipped one."""
    path = Path("" if name is None else name)
    if not path.is_file() and (SHIPPED / f"{name}.pt").is_file():
        path = SHIPPED / f"{name}.pt"
    if not path.is_file():
        shipped = ", ".join(sorted(f.stem for f in SHIPPED.glob("*.pt"))) or "none"
        raise FileNotFoundError(
            f"no learned optimizer {str(name)!r}: give a file's path or a shipped name ({shipped})."
        )
    return path


def load(name: str | os.PathLike, **changes) -> LO:
    """Read a learned optimizer by path, or a shipped one by name, such as load("mulo_m").

    `changes` are to its config: anneal=0.0, say, under a learning rate schedule of your own.
    """
    path = find(name)
    content = _read(path)
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path} was not written by mulo.save: for others' weights see mulo.from_pylo."
        )
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {content.get('version')}, this code reads {VERSION}: "
            "use the release that wrote it, or save it again."
        )
    try:
        config, weights = content["config"], content["weights"]
        if content["sha256"] != _digest(config, weights):
            raise ValueError("its checksum is wrong")
        lo = build(LOConfig(**config), weights)
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]  # torch appends where in its own code it was
        raise ValueError(
            f"{path} is damaged or of another release ({why}): get it again."
        ) from None
    lo.mup = bool((content.get("about", {}).get("recipe") or {}).get("mup"))
    unknown = changes.keys() - config.keys()
    if unknown:
        raise TypeError(
            f"there is no {unknown.pop()!r} in a config: change one of {', '.join(config)}."
        )
    return lo.with_config(**changes) if changes else lo


def digest(lo: LO) -> str:
    """SHA-256 of a learned optimizer's config and weights."""
    return _digest(dataclasses.asdict(lo.config), dict(lo.named_parameters()))


def about(name: str | os.PathLike) -> dict:
    """What was saved with a learned optimizer: its recipe, its meta-loss and so on."""
    return _read(find(name)).get("about", {})


def _digest(config: dict, weights: Phi) -> str:
    """SHA-256 of all that makes a learned optimizer what it is."""
    digest = hashlib.sha256(repr(sorted(config.items())).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> dict:
    """The dict in a file of torch.save's. What is wrong with a damaged file has no end of names."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is damaged, or holds more than tensors and plain values and may run code: "
            "it was not read, get it again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds no weights but {type(content).__name__}: get the right file."
        )
    return content


def build(config: LOConfig, weights: Phi) -> LO:
    """A SmallFC or VeLO with these weights, whose names and shapes must be those of the config."""
    make = {"small_fc": SmallFC, "velo": VeLO}[config.net]
    with torch.device("meta"):  # sizes from a file may be absurd: compare before allocating
        lo = make(config)
    expected = {name: tuple(w.shape) for name, w in lo.named_parameters()}
    given = {name: tuple(w.shape) for name, w in weights.items()}
    wrong = [name for name in expected | given if expected.get(name) != given.get(name)]
    if wrong:
        shapes = ", ".join(
            f"{n} {given.get(n, 'missing')} instead of {expected.get(n, 'none')}" for n in wrong
        )
        raise ValueError(
            f"the weights do not fit {config.net} of hidden_size {config.hidden_size}: {shapes}"
        )
    lo = make(config).float()  # whatever torch's default is
    lo.load_state_dict({name: w.float() for name, w in weights.items()})
    return lo


def _sizes(config: dict, found: dict) -> LOConfig:
    """A config from the sizes found in the weights and the fields given beside them."""
    for name in found.keys() & config.keys():
        if config[name] != found[name]:
            raise ValueError(
                f"{name}={config[name]!r}, but the weights have {found[name]!r}: leave it out."
            )
    unknown = config.keys() - {f.name for f in dataclasses.fields(LOConfig)}
    if unknown:
        raise TypeError(f"unknown config fields {sorted(unknown)}: LOConfig lists them all.")
    return LOConfig(**(config | found))


VELO_NAMES = {"linear_1": "mix", "linear_2": "embed", "rnn.linear": "lstm"}
VELO_NAMES |= {"rnn_to_controls": "controls", "step_size": "alpha"}


def from_reference(arrays: dict, **config) -> LO:
    """A learned optimizer from google/learned_optimization's arrays: their names tell which.

    small_fc: w0, b0, ..., momentum_decays, rms_decays, adafactor_decays. VeLO: rnn/<layer>/w and
    /b, ff/w0, ..., lstm_init_hidden, lstm_init_cell; its unused third output and unused layer are
    dropped. `config` gives lam1, lam2 and other LOConfig fields; sizes are read off the arrays.
    """
    a = {
        name: torch.as_tensor(x).float()
        for name, x in arrays.items()
        if not name.endswith("group_sizes")
    }
    velo = "ff/w0" in a
    prefix = "ff/" if velo else ""
    if f"{prefix}w0" not in a:
        raise ValueError(
            f"no 'w0' or 'ff/w0' among {sorted(a)}: strip the prefix of the arrays' names."
        )
    depth = sum(f"{prefix}w{k}" in a for k in range(len(a)))
    w0 = a[f"{prefix}w0"]
    found = {
        "hidden_size": w0.shape[-1],
        "hidden_layers": depth - 1,
        "net": "velo" if velo else "small_fc",
    }
    if not velo:
        return build(_sizes(config, found), a)
    try:
        phi = {f"bank_{n}{k}": a[f"ff/{n}{k}"] for k in range(depth) for n in "wb"}
        for name in (f"bank_w{depth - 1}", f"bank_b{depth - 1}"):
            phi[name] = phi[name][..., :2]
        for theirs, ours in VELO_NAMES.items():
            phi |= {f"{ours}_{n}": a[f"rnn/{theirs}/{n}"] for n in "wb"}
        phi |= {"hidden0": a["lstm_init_hidden"], "cell0": a["lstm_init_cell"]}
    except KeyError as error:
        raise ValueError(
            f"the array {error} of VeLO is missing: give all arrays of its checkpoint."
        ) from None
    found |= {"lstm_hidden": phi["hidden0"].shape[-1], "param_inits": w0.shape[0]}
    found |= {"spec": "paper"} if w0.shape[1] == 29 else {}
    return build(_sizes(config, found), phi)


def from_pylo(
    path: str | os.PathLike,
    momentum_decays: Sequence[float] = (0.0, 0.0, 0.0),
    rms_decays: Sequence[float] = (0.0,),
    adafactor_decays: Sequence[float] = (0.0, 0.0, 0.0),
    **config,
) -> SmallFC:
    """A small_fc_lopt from the state_dict of PyLO's MetaMLP, a .safetensors or .pt file.

    PyLO keeps the learned decays outside the file, as constructor defaults: pass them here as it
    has them (offsets, 0 for the initial betas), with lam1 (its step_mult) and lam2 (its exp_mult).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {str(path)!r}: give the path of a .safetensors or .pt file."
        )
    if path.suffix == ".safetensors":
        import safetensors.torch

        try:
            weights = safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file: get it again."
            ) from error
    else:
        weights = _read(path)
    depth = sum(f"network.linear_{k}.weight" in weights for k in range(len(weights)))
    layers = ["input", *[f"linear_{k}" for k in range(depth)], "output"]
    try:
        arrays = {f"w{k}": weights[f"network.{name}.weight"].mT for k, name in enumerate(layers)}
        arrays |= {f"b{k}": weights[f"network.{name}.bias"] for k, name in enumerate(layers)}
    except KeyError as error:
        raise ValueError(
            f"{path} has no {error}: it is not the state_dict of a PyLO MetaMLP."
        ) from None
    decays = (momentum_decays, rms_decays, adafactor_decays)
    names = ("momentum_decays", "rms_decays", "adafactor_decays")
    return from_reference(
        arrays | dict(zip(names, map(torch.as_tensor, decays), strict=True)), **config
    )
