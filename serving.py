"""Exported learned optimizers in onnxruntime: `Session`, one graph, and `OrtMuLO`, an Optimizer.

    opt = OrtMuLO(mulo.param_groups(model, roles), "exported/mulo_m.json")
    ...; loss.backward(); opt.step(); opt.zero_grad()

`OrtMuLO` has the param groups and the state_dict of `mulo.MuLO`, so a run can switch between the
two. State is kept in the graphs' memory layout: a step transposes only parameters and gradients.
VeLO's LSTM stays in torch, because its loss features suffer from cancellation in float32.

On CUDA there is one session per shape, so that all sizes are constants, and one stream; the host
syncs only in the checks of every 100th step. A session keeps 512 to 1,024 bytes per parameter of
the tensors in its call.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mulo import MuLO, Stack, Weights, checkpoints, export
from mulo.export import onnxruntime
from mulo.features import Accumulators, Dims, Numbers

# Batch same-shaped tensors up to this many elements: what fits the cache, or 4 GB on CUDA.
MAX_BATCH_ELEMENTS = {"cpu": 2**18, "cuda": 2**22}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def why_no_cuda() -> str:
    """The reason onnxruntime could not load its CUDA provider (it only logs the reason)."""
    for file in Path(onnxruntime.__file__).parent.glob("capi/*onnxruntime_providers_cuda.*"):
        try:
            onnxruntime.register_execution_provider_library("CUDA", str(file))
        except Exception as error:  # of many types, none of them public
            return str(error)
    return f"its providers are {', '.join(onnxruntime.get_available_providers())}"


@functools.cache
def stream_on(device: torch.device) -> torch.cuda.Stream:
    """onnxruntime treats stream 0, torch's default, as "no stream", so use another one."""
    return torch.cuda.Stream(device)


class Session:
    """One exported ONNX graph on the CPU or on CUDA: tensors by name in, new tensors out.

    onnxruntime broadcasts inputs, accepts empty tensors, and falls back to the CPU silently if it
    cannot use CUDA, so a session checks its inputs and its device.
    """

    def __init__(
        self,
        graph: str | Path | bytes,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        **sizes: int,  # fixed sizes b, e, m, n
    ):
        self.device, self.sizes, self.stream = torch.device(device), sizes, None
        if self.device.type not in PROVIDERS:
            raise ValueError(f"onnxruntime has no device '{self.device}': use 'cpu' or 'cuda'.")
        options, self.run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # cores for torch
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        provider, settings = PROVIDERS[self.device.type], {}
        if self.device.type == "cpu":
            options.log_severity_level = 4  # errors are raised; on CUDA, warnings help
        else:  # TF32 has 10 bits of mantissa; by default the arena doubles
            settings = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
            if torch.cuda.is_available():  # else opening the session fails
                self.stream = stream_on(self.device)
                self.device = self.stream.device  # with its index
                settings["device_id"] = str(self.device.index or 0)
                settings["user_compute_stream"] = str(self.stream.cuda_stream)
            self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        with self.current_device_kept():
            self.session = self.open(graph, options, (provider, settings))
        text = self.session.get_modelmeta().custom_metadata_map.get("mulo", "")
        export.read_config(text, "the graph" if isinstance(graph, bytes) else graph)
        self.inputs = {x.name: tuple(x.shape) for x in self.session.get_inputs()}
        self.outputs = {x.name: tuple(x.shape) for x in self.session.get_outputs()}
        self.binding = self.session.io_binding()

    def current_device_kept(self) -> contextlib.AbstractContextManager:
        """onnxruntime changes the thread's current CUDA device; this restores it."""
        return torch.cuda.device(self.device) if self.stream else contextlib.nullcontext()

    def open(self, graph, options, provider: tuple[str, dict[str, str]]):
        """Return an onnxruntime.InferenceSession, or raise with onnxruntime's reason."""
        try:
            arguments = graph, options, [provider]
            session = onnxruntime.InferenceSession(*arguments, enable_fallback=False)
            if session.get_providers()[0] == provider[0]:
                return session
            reason = why_no_cuda()
        except RuntimeError as error:  # CUDA has no driver or no GPU
            reason = str(error)
        cannot = f"onnxruntime {onnxruntime.__version__} cannot run on CUDA here ({reason})"
        fix = "install onnxruntime-gpu with its CUDA 13 and cuDNN 9, or pass device='cpu'"
        raise RuntimeError(f"{cannot}: {fix}.")

    def check(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        """Raise unless these are inputs of the graph; returns the sizes b, e, m, n and T."""
        if wrong := sorted(inputs.keys() ^ self.inputs.keys()):
            raise ValueError(f"inputs must be {list(self.inputs)}: {wrong} are missing or unknown.")
        sizes = dict(self.sizes)
        for name, x in inputs.items():
            shape = self.inputs[name]
            pairs = zip(shape, x.shape, strict=False)
            sizes = {d: n for d, n in pairs if isinstance(d, str)} | sizes
            fits = tuple(x.shape) == tuple(sizes.get(d, d) for d in shape) and x.numel()
            right_kind = x.dtype == torch.float32 and x.device == self.device
            if not (fits and right_kind and x.is_contiguous()):
                wanted = f"contiguous float32 on {self.device}, not empty and {shape} with {sizes}"
                given = f"{x.dtype} on {x.device}, {tuple(x.shape)}"
                raise ValueError(f"{name} must be {wanted}, not {given}.")
        return sizes

    def run(self, inputs: dict[str, Tensor], inplace: Iterable[str] = ()) -> dict[str, Tensor]:
        """Run the graph; the states named in `inplace` are overwritten by their new values."""
        sizes = self.check(inputs)
        outputs = {f"new_{k}": inputs[k] for k in inplace}
        for k, shape in self.outputs.items():
            if k not in outputs:
                shape = [sizes.get(d, d) for d in shape]
                outputs[k] = torch.empty(shape, dtype=torch.float32, device=self.device)
        where = self.device.type, self.device.index or 0, np.float32
        for name, x in inputs.items():
            self.binding.bind_input(name, *where, tuple(x.shape), x.data_ptr())
        for name, x in outputs.items():
            self.binding.bind_output(name, *where, tuple(x.shape), x.data_ptr())
        with self.current_device_kept():
            if self.stream:  # order the two streams on the GPU; the host waits for neither
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
            self.session.run_with_iobinding(self.binding, self.run_options)
            if self.stream:  # torch may then reuse the memory of the inputs
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return outputs


def in_graph(x: Tensor, dims: Dims) -> Tensor:
    """A view with the axes m and n last."""
    if dims is None or dims == (-2, -1):
        return x
    return x.mT if dims == (-1, -2) else x.movedim(dims, (-2, -1))


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether all entries are finite; a sum beyond float32 counts as not."""
    return bool(torch.stack([x.sum(dtype=torch.float32) for x in tensors]).isfinite().all())


class OrtMuLO(MuLO):
    """`mulo.MuLO` whose step runs in onnxruntime; `exported` is the .json that export.py wrote."""

    def __init__(
        self,
        params: Iterable,
        exported: str | Path,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        num_steps: int | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
    ):
        optimizers = export.sidecars(exported)
        if len(optimizers) != 1:
            raise ValueError(f"{exported} has {len(optimizers)} optimizers: give the .json of one.")
        [(path, about)] = optimizers

        def file(suffix: str) -> Path:
            return export.checked(path.parent, f"{about['name']}.{suffix}", about)

        self.requested, self.threads, self._sessions = torch.device(device), threads, {}
        self.graphs = {kind: file(f"{kind}.onnx").read_bytes() for kind in ("vector", "tensor")}
        lo = checkpoints.load(file("pt"))
        super().__init__(params, lo, lr, weight_decay, num_steps, backend="folded")
        first = self.session("vector", (1, 1))  # opened now, so that errors are raised early
        self.device = first.device  # with its index

    def session(self, kind: str, shape: tuple[int, ...]) -> Session:
        """The graph of this kind, opened when it is first needed; on CUDA, for this shape of p."""
        axes = "bemn" if kind == "tensor" else "bn"
        sizes = dict(zip(axes, shape, strict=True)) if self.requested.type == "cuda" else {}
        key = kind, *sizes.values()
        if key not in self._sessions:
            options = self.requested, self.threads
            self._sessions[key] = Session(self.graphs[kind], *options, **sizes)
        return self._sessions[key]

    def __getstate__(self) -> dict:
        names = ("requested", "device", "threads", "graphs")
        return super().__getstate__() | {k: getattr(self, k) for k in names} | {"_sessions": {}}

    def _with_gradients(self) -> list[tuple[nn.Parameter, dict]]:
        """Check the parameters before anything is changed."""
        params = super()._with_gradients()
        for p, _ in params:
            if p.device != self.device:
                where = f"a parameter is on {p.device}, the optimizer on '{self.device}'"
                raise RuntimeError(f"{where}: move the model, or pass OrtMuLO the device.")
            if p.dtype == torch.float64:
                fix = "use mulo.MuLO for float64 parameters"
                raise RuntimeError(f"exported graphs are float32: {fix}.")
        due = self.requested.type == "cpu" or self.param_groups[0]["step"] % 100 == 0  # it syncs
        if params and due and not all_finite([p.detach() for p, _ in params]):
            raise ValueError("a parameter has NaN or infinite entries: go back to a checkpoint.")
        return params

    def _stack(self, p: nn.Parameter, group: dict) -> Stack:
        """As in MuLO, but with state in the graphs' memory layout: steps need not transpose it."""
        stack, state = super()._stack(p, group), self.state[p]
        if state["c"] is state["r"]:  # of a vector; graphs write both in place
            state["c"] = state["r"].clone()
            stack = super()._stack(p, group)
        views = [in_graph(x, stack.dims) for x in stack.acc]
        if all(x.is_contiguous() for x in views):
            return stack
        for k, x in zip(Accumulators._fields, views, strict=True):
            self.state[p][k] = x.contiguous().movedim((-2, -1), stack.dims)[0]
        return super()._stack(p, group)

    def _advance(
        self, _, weights: Weights, stacks: list[Stack], grads: list[Tensor], numbers: Numbers
    ) -> Tensor | int:
        """Run the graphs on all tensors; returns how many gradient entries are not finite."""
        by_shape: dict[tuple, list[int]] = {}
        for n, x in enumerate(stacks):
            by_shape.setdefault(in_graph(x.p, x.dims).shape, []).append(n)
        for shape, members in by_shape.items():
            size = max(1, MAX_BATCH_ELEMENTS[self.requested.type] // math.prod(shape))
            for start in range(0, len(members), size):
                self._run(stacks, grads, weights, numbers, members[start : start + size])
        if self.requested.type == "cpu" and all_finite(grads):
            return 0
        return sum((~g.isfinite()).sum() for g in grads)

    def _run(
        self,
        stacks: list[Stack],
        grads: list[Tensor],
        weights: Weights,
        numbers: Numbers,  # (1, T) each
        index: list[int],  # of tensors with one shape in the graph
    ) -> None:
        """Run the graph once for the tensors of this index, and store its results."""
        batch, config = [stacks[n] for n in index], self.lo.config
        kind = "tensor" if batch[0].dims else "vector"
        views = {"p": [in_graph(x.p, x.dims) for x in batch]}
        views |= {k: [in_graph(getattr(x.acc, k), x.dims) for x in batch] for k in "MVrc"}

        def gather(parts: list[Tensor]) -> Tensor:
            if len(parts) > 1:
                x = torch.cat(parts).float()
            else:  # torch transposes fast if there are two axes
                x = parts[0].squeeze().float().contiguous().view(parts[0].shape)
            lead = x.ndim - batch[0].p.ndim + 1  # e is all axes between these and m
            return x if kind == "vector" else x.reshape(*x.shape[:lead], -1, *x.shape[-2:])

        inputs = {k: gather(parts) for k, parts in views.items()}
        inputs["g"] = gather([in_graph(grads[n], stacks[n].dims) for n in index])
        for name, row in numbers._asdict().items():
            if name != "eps_scale" or config.eps == "fan_in":
                inputs[name] = torch.cat([row[0, n : n + 1] for n in index])  # a list would sync
        if config.net == "velo":
            phi = weights.phi.items()
            inputs |= {k: torch.cat([w[0, n : n + 1] for n in index]) for k, w in phi}
            inputs["features"] = inputs["p"].new_zeros(len(index), 12)
        # The graph reads a state only to compute its new value, which may overwrite it.
        inplace = [k for k in "MVrc" if inputs[k].data_ptr() == views[k][0].data_ptr()]
        outputs = self.session(kind, inputs["p"].shape).run(inputs, inplace)
        for k in views.keys() - set(inplace):
            old, new = views[k], outputs[f"new_{k}"].reshape(-1, *views[k][0].shape[1:])
            if len(old) > 1:
                torch._foreach_copy_(old, new.split(1))
            else:  # torch copies fast to a contiguous target
                a, b = old[0].squeeze(), new.squeeze()
                a.T.copy_(b.T) if a.ndim == 2 else a.copy_(b)

    def _param_scale(self, mean_square: Tensor) -> Tensor:
        return torch.ones_like(mean_square)  # the graph multiplies by RMS(W)


if __name__ == "__main__":
    raise SystemExit(
        "serving.py is a module, not a command: use `from mulo.serving import OrtMuLO`."
    )
