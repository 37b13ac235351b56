"""Files of learned optimizers: load, save, and import the weights of other projects.

    lo = load("mulo_m"); save(lo, "mine.pt", seed=0)

A file holds a format version, the config and the weights, and nothing that could run code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mulo.features import Phi
from mulo.nets import LO, NETS, LOConfig, SmallFC

FORMAT, VERSION = "mulo", 1
SHIPPED = Path(__file__).parent / "weights"


def write_atomically(path: str | os.PathLike, content: str | bytes | Callable) -> None:
    """Write to a temporary file, then rename it. `content`: text, bytes, or a writer(file)."""
    path = Path(path)
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
    """Write a learned optimizer to a file, with plain values such as command= or seed=. `load`
    returns them in `lo.about`, with those that lo.about has now."""
    weights = {name: w.detach().float().cpu().clone() for name, w in lo.named_parameters()}
    config, about = dataclasses.asdict(lo.config), lo.about | about
    content = {"format": FORMAT, "version": VERSION, "about": about, "config": config}
    content |= {"weights": weights, "sha256": _sha256(config, weights)}
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # torch raises many exception types here
        raise TypeError(f"give plain numbers and strings to save, not {about!r}.") from error
    write_atomically(path, buffer.getvalue())


def find(name: str | os.PathLike) -> Path:
    """Return the file of a learned optimizer, given its path or the name of a shipped one."""
    for path in (Path(str(name)), SHIPPED / f"{name}.pt"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(f.stem for f in SHIPPED.glob("*.pt")))
    raise FileNotFoundError(f"no file {str(name)!r}: give a path or a shipped name ({shipped}).")


def load(name: str | os.PathLike, **changes) -> LO:
    """Load a learned optimizer from a path, or a shipped one by name, such as load("mulo_m").

    `changes` replace fields of the config, such as anneal=0.0.
    """
    path = find(name)
    content = read(path)
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} was not written by mulo.save: see from_pylo, from_reference.")
    try:
        unused = "multipliers", False  # a removed field that shipped files still have
        fields = dict(x for x in content["config"].items() if x != unused)
        config, weights = LOConfig(**fields), content["weights"]
        if content["sha256"] != _sha256(fields, weights):
            raise ValueError("its checksum is wrong")
        inputs, now = weights.get("w0", weights.get("bank_w0")).shape[-2], config.num_features
        if inputs != now:
            raise ValueError(f"meta-trained with {inputs} features, this code has {now}")
        lo = build(config, weights)
    except Exception as error:  # a file may hold anything
        reason = str(error).partition("\n")[0]  # torch adds a stack trace
        raise ValueError(f"{path} is damaged or of another release ({reason}).") from None
    lo.about = content.get("about", {})
    return lo.with_config(**changes) if changes else lo


def digest(lo: LO) -> str:
    """SHA-256 of the config and weights of a learned optimizer."""
    return _sha256(dataclasses.asdict(lo.config), dict(lo.named_parameters()))


# Fields added to LOConfig later: at these values they are not hashed, so older files stay valid.
NOT_HASHED = {"input_base": None, "by_channels": False}


def _sha256(config: dict, weights: Phi) -> str:
    fields = sorted((k, v) for k, v in config.items() if NOT_HASHED.get(k, ...) != v)
    sha256 = hashlib.sha256(repr(fields).encode())
    for name in sorted(weights):
        sha256.update(name.encode())
        sha256.update(weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def read(path: Path) -> dict:
    """Return the dict in a file written by torch.save."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises many exception types
        if path.suffix == ".npz":
            raise ValueError(f"{path} holds arrays: see mulo.from_reference.") from None
        raise ValueError(f"{path} was not read: it is damaged, or may run code.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, no weights.")
    return content


def build(config: LOConfig, weights: Phi) -> LO:
    """A SmallFC or VeLO with a copy of these weights, which must fit the config."""
    with torch.device("meta"):  # a file may claim absurd sizes: compare before allocating
        lo = NETS[config.net](config)
    try:
        lo.load_state_dict({k: w.float().clone() for k, w in weights.items()}, assign=True)
    except RuntimeError as error:
        wrong = " ".join(str(error).split())  # one line
        raise ValueError(f"the weights do not fit {config.net}: {wrong}") from None
    return lo


# Names in the released files: haiku's tree of modules, joined by slashes.
HAIKU = {"rnn_params/": "rnn/", "rnn/rnn/linear": "rnn/rnn.linear", "ff_mod_stack/~/": "ff/"}
HAIKU |= {"lstm_init_state/": "lstm_init_"}
VELO_NAMES = {"linear_1": "mix", "linear_2": "embed", "rnn.linear": "lstm"}
VELO_NAMES |= {"rnn_to_controls": "controls", "step_size": "alpha"}


def from_reference(arrays: dict, **config) -> LO:
    """Import the arrays of a learned optimizer of google/learned_optimization, by their names.

    small_fc has w0, b0, ..., momentum_decays, rms_decays, adafactor_decays. VeLO has rnn/<layer>/w
    and /b, ff/w0, ..., lstm_init_hidden, lstm_init_cell, or the names of the released tree
    (rnn_params/..., ff_mod_stack/~/w0__0, ...). `config` gives lam1, lam2 and other fields of
    LOConfig, such as param_scale_mult=True for VeLO as released. Sizes follow from the arrays.
    """
    a = {k: torch.as_tensor(x).float() for k, x in arrays.items() if not k.endswith("group_sizes")}
    for theirs, ours in HAIKU.items():
        a = {k.replace(theirs, ours): x for k, x in a.items()}
    if "ff/w0__0" in a:  # the first layer, split by groups of features
        groups = [a.pop(f"ff/w0__{k}") for k in range(sum(k.startswith("ff/w0__") for k in a))]
        a["ff/w0"] = torch.cat(groups, -2)
    prefix = "ff/" if "ff/w0" in a else ""
    if f"{prefix}w0" not in a:
        raise ValueError(f"no 'w0' or 'ff/w0' among {sorted(a)}: strip the prefix of the names.")
    w0, layers = a[f"{prefix}w0"], sum(f"{prefix}w{k}" in a for k in range(len(a)))
    sizes = {"hidden_size": w0.shape[-1], "hidden_layers": layers - 1}
    if not prefix:
        return build(LOConfig(**config, **sizes, net="small_fc"), a)
    try:
        phi = {f"bank_{n}{k}": a[f"ff/{n}{k}"] for k in range(layers) for n in "wb"}
        for name in (f"bank_w{layers - 1}", f"bank_b{layers - 1}"):
            phi[name] = phi[name][..., :2]  # the third output is unused
        for theirs, ours in VELO_NAMES.items():
            phi |= {f"{ours}_{n}": a[f"rnn/{theirs}/{n}"] for n in "wb"}
        phi |= {"hidden0": a["lstm_init_hidden"], "cell0": a["lstm_init_cell"]}
    except KeyError as error:
        raise ValueError(f"VeLO's array {error} is missing: give its whole checkpoint.") from None
    sizes |= {"lstm_hidden": phi["hidden0"].shape[-1], "param_inits": w0.shape[0]}
    config = {"spec": "paper" if w0.shape[1] == 29 else "reference"} | config
    return build(LOConfig(**config, **sizes, net="velo"), phi)


def from_pylo(
    path: str | os.PathLike,
    momentum_decays: Sequence[float] = (0.0, 0.0, 0.0),
    rms_decays: Sequence[float] = (0.0,),
    adafactor_decays: Sequence[float] = (0.0, 0.0, 0.0),
    **config,
) -> SmallFC:
    """Import a small_fc_lopt from the state_dict of PyLO's MetaMLP, a .safetensors or .pt file.

    PyLO keeps the learned decays as defaults of its constructor, not in the file: pass the same
    values here (offsets; 0 is the initial beta), with lam1 (its step_mult) and lam2 (its exp_mult).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}.")
    if path.suffix == ".safetensors":
        import safetensors.torch

        weights = safetensors.torch.load_file(path)
    else:
        weights = read(path)
    hidden = sum(f"network.linear_{k}.weight" in weights for k in range(len(weights)))
    layers = ["input", *[f"linear_{k}" for k in range(hidden)], "output"]
    try:
        arrays = {f"w{k}": weights[f"network.{name}.weight"].mT for k, name in enumerate(layers)}
        arrays |= {f"b{k}": weights[f"network.{name}.bias"] for k, name in enumerate(layers)}
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: it is not PyLO's MetaMLP state_dict.") from None
    arrays |= {"momentum_decays": momentum_decays, "rms_decays": rms_decays}
    return from_reference(arrays | {"adafactor_decays": adafactor_decays}, **config)
