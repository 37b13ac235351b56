"""Exported learned optimizers in onnxruntime: the files, their checks, and an Optimizer.

    opt = OrtMuLO(mulo.param_groups(model, roles), "exported/mulo_m.json")
    ...; loss.backward(); opt.step(); opt.zero_grad()

`OrtMuLO` is `mulo.MuLO` with its arithmetic done by onnxruntime: same param groups, same state_dict
(a run may change from one to the other), equal-shaped tensors in one call. Tensors are bound where
torch has them, without copies; state alternates between two sets of buffers, as a graph must not
write what it reads. Tensors of rank 3 or more are brought to (b, e, m, n), which is the same step.

onnxruntime takes what it is given: it broadcasts, accepts empty tensors and NaNs, and when CUDA
cannot be had it runs on the CPU without a word. So `Session` checks, and asks where it runs.
onnxruntime-gpu 1.31 needs CUDA 13 and cuDNN 9.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

import checkpoints
import features
from features import Accumulators, LossBuffer
from lo import Phi
from mulo import Bucket, MuLO

FORMAT, VERSION = "mulo-export", 1


def read_config(text: str | bytes, path: str | os.PathLike) -> dict:
    """The config that every exported file carries, if it is one that this code reads."""
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by export.py: export it anew.")
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {config.get('version')}, this code reads {VERSION}: "
            "use the release that wrote it, or export it anew."
        )
    if not isinstance(config.get("name"), str):
        raise ValueError(f"{path} does not name its optimizer: export it anew.")
    return config


def sidecar(path: str | os.PathLike) -> tuple[Path, dict]:
    """The .json beside exported files, given by its path or by their folder, and what it says."""
    found = sidecars(path)
    if len(found) != 1:
        raise FileNotFoundError(
            f"{path} is not one exported optimizer: give the .json that export.py wrote."
        )
    path = found[0].resolve()
    config = read_config(path.read_bytes(), path)
    if not isinstance(config.get("sha256"), dict):
        raise ValueError(f"{path} has no digests of its files: export the optimizer anew.")
    return path, config


def sidecars(path: str | os.PathLike) -> list[Path]:
    """All of them in a folder, or the file itself."""
    path = Path(path)
    if not path.is_dir():
        return [path] if path.is_file() else []
    files = sorted(path.glob("*.json"))
    return [f for f in files if f'"{FORMAT}"' in f.read_text(errors="ignore")]


def checked(folder: Path, name: str, config: dict) -> Path:
    """The path of an exported file whose SHA-256 is the one in the sidecar."""
    path = folder / name
    if name not in config["sha256"]:
        raise ValueError(f"the .json does not list {name}: export the optimizer anew.")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: export the optimizer anew.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != config["sha256"][name]:
        raise ValueError(f"{path} is damaged, or not the file its .json is of: export it anew.")
    return path


def with_block(path: str | os.PathLike, entries: int) -> bytes:
    """An exported ONNX file that works on so many entries of a tensor at a time."""
    model = onnx.load(path)
    for x in model.graph.initializer:
        if x.name == "block":
            x.CopyFrom(onnx.helper.make_tensor(x.name, x.data_type, [1], [entries]))
    return model.SerializeToString()


def check_finite(name: str, x: Tensor) -> None:
    """Raise unless all entries are finite, and not negative where they are means of squares."""
    low, high = (float(v) for v in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} has NaN or infinite entries: go back to a checkpoint.")
    if low < 0 and name.split()[-1] in ("second_moment", "row", "col", "V", "r", "c"):
        raise ValueError(f"{name} has negative entries: go back to a checkpoint.")


def place(device: str | torch.device) -> torch.device:
    """The device, with its index if it is a GPU."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


class Session:
    """One exported ONNX graph, on the CPU or on CUDA, with its inputs checked."""

    def __init__(
        self,
        path: str | os.PathLike,
        device: str = "cpu",
        threads: int | None = None,
        block: int | None = None,  # entries that are worked on at a time; on CUDA all of them
    ):
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path}: export the optimizer anew.")
        self.device = place(device)
        kind = self.device.type
        wanted = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}.get(kind)
        if wanted is None:
            raise ValueError(f"device {device!r} is unknown to onnxruntime: use 'cpu' or 'cuda'.")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch works too
        cannot = (
            f"onnxruntime {onnxruntime.__version__} cannot run on CUDA here: install "
            "onnxruntime-gpu with its CUDA 13 and cuDNN 9, or pass device='cpu'."
        )
        if wanted not in onnxruntime.get_available_providers():
            raise RuntimeError(cannot)
        block = 2**40 if block is None and kind == "cuda" else block
        settings = {}
        if kind == "cuda":  # TF32, its default, has 10 bits: not the step that was exported
            settings = {"device_id": str(self.device.index), "use_tf32": "0"}
        try:
            model = str(path) if block is None else with_block(path, block)
            self.session = onnxruntime.InferenceSession(
                model, options, providers=[(wanted, settings)]
            )
        except Exception as error:  # of many kinds, none of them public
            raise ValueError(f"{path} is damaged or not an ONNX file: export it anew.") from error
        if self.session.get_providers()[0] != wanted:  # available was not to say usable
            raise RuntimeError(cannot)
        text = self.session.get_modelmeta().custom_metadata_map.get("mulo", "")
        self.config = read_config(text, path)
        self.kind = self.session.get_modelmeta().graph_name
        self.inputs = {x.name: tuple(x.shape) for x in self.session.get_inputs()}
        self.outputs = {x.name: tuple(x.shape) for x in self.session.get_outputs()}
        self.binding = self.session.io_binding()

    def check(self, inputs: dict[str, Tensor], finite: Iterable[str] = ()) -> dict[str, int]:
        """Raise unless these are the graph's inputs; `finite` names those to be looked at."""
        if inputs.keys() != self.inputs.keys():
            odd = sorted(inputs.keys() ^ self.inputs.keys())
            raise ValueError(f"inputs must be {list(self.inputs)}: {odd} are missing or unknown.")
        sizes: dict[str, int] = {}
        for name, x in inputs.items():
            shape = self.inputs[name]
            self._check_kind(name, x)
            fits = x.ndim == len(shape) and x.numel() and x.is_contiguous()
            for symbol, size in zip(shape, x.shape, strict=False) if fits else ():
                known = sizes.setdefault(symbol, size) if isinstance(symbol, str) else symbol
                fits = fits and known == size
            if not fits:
                raise ValueError(
                    f"{name} must be contiguous, not empty and {shape} with {sizes}, "
                    f"not {tuple(x.shape)}."
                )
        m, n = sizes.get("m"), sizes.get("n")
        if (self.kind == "matrix" and m > n) or (self.kind == "tall" and m < n):
            other = "matrix" if self.kind == "tall" else "tall"
            raise ValueError(f"a {m} x {n} tensor is not for the {self.kind} graph: use {other}.")
        if self.kind == "tensor" and m > n:
            raise ValueError(f"m = {m} exceeds n = {n}: put the largest axis last.")
        for name in finite:
            check_finite(name, inputs[name])
        return sizes

    def _check_kind(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(x).__name__}.")
        if x.dtype != torch.float32 or x.device != self.device:
            raise ValueError(
                f"{name} must be float32 on {self.device}, not {x.dtype} on {x.device}."
            )

    def _check_outputs(
        self, outputs: dict[str, Tensor], inputs: dict[str, Tensor], sizes: dict[str, int]
    ) -> None:
        """onnxruntime writes to where it is told: memory of another size or kind would be lost."""
        read = {x.data_ptr() for x in inputs.values()}
        for name, x in outputs.items():
            if name not in self.outputs:
                raise ValueError(f"there is no output {name}: they are {list(self.outputs)}.")
            self._check_kind(name, x)
            shape = tuple(sizes.get(d, d) for d in self.outputs[name])
            if tuple(x.shape) != shape or not x.is_contiguous() or x.data_ptr() in read:
                raise ValueError(f"{name} must be contiguous, {shape} and not one of the inputs.")

    def run(
        self,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor] | None = None,
        finite: Iterable[str] | None = None,
    ) -> dict[str, Tensor]:
        """Run the graph; results go to `outputs` where given (never an input), else to new tensors.

        All inputs must be finite but the gradient, whose bad entries the graph takes as 0, and the
        loss; `finite` names those to be looked at.
        """
        if finite is None:
            finite = [k for k in inputs if k not in ("grad", "loss")]
        sizes = self.check(inputs, finite)
        outputs = dict(outputs or {})
        self._check_outputs(outputs, inputs, sizes)
        for name, shape in self.outputs.items():
            if name not in outputs:
                shape = [sizes.get(d, d) for d in shape]
                outputs[name] = torch.empty(shape, dtype=torch.float32, device=self.device)
        where = self.device.type, self.device.index or 0, np.float32
        for bind, tensors in (
            (self.binding.bind_input, inputs),
            (self.binding.bind_output, outputs),
        ):
            for name, x in tensors.items():
                bind(name, *where, tuple(x.shape), x.data_ptr())
        if self.device.type == "cuda":  # onnxruntime has a stream of its own
            torch.cuda.current_stream(self.device).synchronize()
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()
        return outputs


class Layout:
    """How tensors of one shape are laid out for a graph, and which graph that is."""

    def __init__(self, shape: tuple[int, ...], dims: features.Dims):
        self.shape, self.dims, rank = shape, dims, len(shape)
        self.kind = {1: "vector", 2: "tall" if dims == (-1, -2) else "matrix"}.get(rank, "tensor")
        self.order = list(range(-rank, 0))
        if rank > 2:
            self.order = [k for k in self.order if k not in dims] + list(dims)

    def to_graph(self, x: Tensor) -> Tensor:
        """(S, [3,] *shape) to (b, [3,] [e,] m, n), contiguous; a copy only where it must be."""
        lead = x.ndim - len(self.shape)
        x = x.permute(*range(lead), *self.order).contiguous()
        return x.flatten(lead, -3) if len(self.shape) > 2 else x

    def from_graph(self, x: Tensor, like: Tensor) -> Tensor:
        """The way back, as a view in the shape of `like`."""
        rank = len(self.shape)
        if rank > 2:
            lead = like.ndim - rank
            x = x.reshape(*like.shape[:lead], *(like.shape[k] for k in self.order))
            back = [self.order.index(k) - rank for k in range(-rank, 0)]
            return x.permute(*range(lead), *back)
        return x.reshape(like.shape)

    def state(self, acc: Accumulators) -> dict[str, Tensor]:
        """A graph's names for accumulators."""
        r, c = self.to_graph(acc.r), self.to_graph(acc.c)
        row, col = (c, r) if self.kind == "tall" else (r, c)
        if self.dims is not None:
            row, col = row.squeeze(-1), col.squeeze(-2)
        M, V = self.to_graph(acc.M), self.to_graph(acc.V)
        return {"second_moment": V, "momentum": M, "row": row, "col": col}

    def accumulators(self, state: dict[str, Tensor], like: Accumulators) -> Accumulators:
        """The way back, as views."""
        r, c = state["row"], state["col"]
        r, c = (c, r) if self.kind == "tall" else (r, c)
        new = Accumulators(state["momentum"], state["second_moment"], r, c)
        return Accumulators(*map(self.from_graph, new, like))


class OrtMuLO(MuLO):
    """`mulo.MuLO` whose step runs in onnxruntime; `exported` is what export.py wrote."""

    def __init__(
        self,
        params: Iterable,
        exported: str | os.PathLike,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        num_steps: int | None = None,
        device: str = "cpu",
        threads: int | None = None,
    ):
        self.path, self.about = sidecar(exported)  # and its digests: later changes are refused
        self.device, self.threads = place(device), threads
        self._sessions: dict[str, Session] = {}
        path = checked(self.path.parent, f"{self.about['name']}.pt", self.about)
        super().__init__(params, checkpoints.load(path), lr, weight_decay, num_steps)
        self.session("vector")  # so that what is missing is said now

    def _forget(self) -> None:
        super()._forget()
        self._spare: dict[tuple, dict[str, Tensor]] = {}  # where a bucket's next state goes
        self._made: dict[tuple, Tensor] = {}  # momenta that a graph has made: known to be finite

    def __getstate__(self) -> dict:
        names = ("path", "about", "device", "threads")
        return super().__getstate__() | {k: getattr(self, k) for k in names} | {"_sessions": {}}

    def session(self, kind: str) -> Session:
        """The graph of this kind, opened when it is first needed."""
        if kind not in self._sessions:
            file = checked(self.path.parent, f"{self.about['name']}.{kind}.onnx", self.about)
            self._sessions[kind] = Session(file, self.device, self.threads)
        return self._sessions[kind]

    def _bucket(self, key: tuple, params: tuple, groups: tuple) -> Bucket:
        if params[0].device != self.device:
            raise RuntimeError(
                f"a parameter is on {params[0].device}, the optimizer on '{self.device}': move the "
                "model, or pass OrtMuLO the device."
            )
        if params[0].dtype == torch.float64:
            raise RuntimeError("exported graphs are float32: use mulo.MuLO for float64 parameters.")
        b = super()._bucket(key, params, groups)
        b.key = key
        return b

    def _nets(self, buckets: list[Bucket], loss: Tensor | float | None) -> list[tuple]:
        for b in buckets:  # all of them before any is changed; off the CPU a look has to wait
            self.session(Layout(tuple(b.p.shape[1:]), b.dims).kind)
            for group in b.groups:
                if not math.isfinite(group["lr"] * group["scale"]):
                    raise ValueError(f"lr={group['lr']} is not finite: lower it.")
            if b.p.device.type == "cpu" or b.groups[0]["step"] % 100 == 0:
                check_finite("a parameter", b.p)
            if self._made.get(b.key) is not b.acc.M:
                for name, x in b.acc._asdict().items():
                    check_finite(f"the optimizer's state {name}", x)
        velo = self.lo.config.net == "velo"
        return self._generate(buckets, loss) if velo else [({}, 1.0)] * len(buckets)

    def _advance(self, b: Bucket, weights: Phi, alpha: Tensor | float) -> Tensor | None:
        """Step a bucket; new state goes to the bucket's other buffers, which then take turns."""
        layout, key = Layout(tuple(b.p.shape[1:]), b.dims), b.key
        old = layout.state(b.acc)
        p, g = (layout.to_graph(x).float() for x in (b.p, b.g))
        new = self._spare.get(key)
        if new is None or new["momentum"].shape != old["momentum"].shape:
            new = {k: torch.empty_like(x) for k, x in old.items()}
        rate = b.per_tensor(lambda group: group["lr"] * group["scale"]) * alpha
        more = {k: w.contiguous() for k, w in weights.items()}
        if self.lo.config.eps == "fan_in":
            more["fan_in"] = b.per_tensor(lambda group: group["fan_in"])

        new_p = torch.empty_like(p)
        steps = [float(group["step"]) for group in b.groups]
        cuts = [k for k in range(len(steps)) if k == 0 or steps[k] != steps[k - 1]]
        for start, end in zip(cuts, [*cuts[1:], len(steps)], strict=True):  # one time a call
            part = slice(start, end)
            inputs = {"param": p, "grad": g} | old | {"lr_scale": rate} | more
            inputs = {k: x[part] for k, x in inputs.items()}
            inputs["step"] = torch.tensor(steps[start], dtype=torch.float32, device=p.device)
            outputs = {f"new_{k}": x[part] for k, x in ({"param": new_p} | new).items()}
            self.session(layout.kind).run(inputs, outputs, finite=())

        if any(group["weight_decay"] for group in b.groups):
            decay = b.per_tensor(lambda group: group["lr"] * group["weight_decay"])
            new_p -= features.trailing(decay, p.ndim) * p
        b.p.copy_(layout.from_graph(new_p, b.p))
        self._swap(b, old, new, layout)
        clean = b.p.device.type == "cpu" and features.is_clean(b.g)
        return None if clean else (~b.g.isfinite()).sum()

    def _swap(self, b: Bucket, old: dict, new: dict, layout: Layout) -> None:
        acc = layout.accumulators(new, b.acc)
        views = [{k: x[n] for k, x in acc._asdict().items()} for n in range(len(b.params))]
        for q, view in zip(b.params, views, strict=True):
            self.state[q].update(view)
        self._stacks[b.key], self._spare[b.key] = (acc, views), old
        self._made[b.key] = acc.M

    # VeLO

    def _net(self, b: Bucket, phi: Phi, alpha: Tensor) -> tuple[Phi, Tensor]:
        return phi, alpha

    def _tensor_features(self, b: Bucket) -> Tensor:
        S, rank = len(b.p), float(sum(n > 1 for n in b.p.shape[1:]))
        inputs = {"param": b.p.float().reshape(S, -1)}
        inputs |= {"second_moment": b.acc.V.reshape(S, -1), "momentum": b.acc.M.reshape(S, 3, -1)}
        inputs |= {"rank": torch.tensor(rank, dtype=torch.float32, device=b.p.device)}
        return self.session("stats").run(inputs)["features"]

    def _hyper(
        self,
        phi: Phi,
        memory: LossBuffer,
        loss: Tensor,
        t: Tensor,
        x_tensor: Tensor,
        h: Tensor,
        cell: Tensor,
    ) -> tuple[LossBuffer, Tensor, Tensor, Phi, Tensor]:
        bugged = self.lo.config.use_bugged_loss_features
        inputs = {"features": x_tensor, "loss": loss, "step": t, "hidden": h, "cell": cell}
        inputs["num_steps"] = torch.tensor(self.num_steps, dtype=torch.float32, device=t.device)
        inputs["loss_decay"] = features.loss_decays(self.num_steps, bugged, t.device).float()
        inputs |= {f"loss_{k}": x.float() for k, x in memory._asdict().items()}
        out = self.session("hyper").run(inputs)
        memory = LossBuffer(*(out.pop(f"new_loss_{k}") for k in LossBuffer._fields))
        h, cell, alpha = (out.pop(k) for k in ("new_hidden", "new_cell", "alpha"))
        return memory, h, cell, out, alpha
