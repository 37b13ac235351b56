"""Exported learned optimizers in onnxruntime: `Session`, one graph, and `OrtMuLO`, an Optimizer.

    opt = OrtMuLO(mulo.param_groups(model, roles), "exported/mulo_m.json")
    ...; loss.backward(); opt.step(); opt.zero_grad()

`OrtMuLO` has the param groups and the state_dict of `mulo.MuLO`, so a run can switch between the
two. State is kept in the graphs' memory layout and updated in place: a step transposes and copies
only parameters, gradients, and r and c of vectors. VeLO's LSTM stays in torch: runtimes round
differently, and its loss features amplify that.

Graphs run where the parameters are, on the CPU or on CUDA. On CUDA there is one session per shape,
so that all sizes are constants, and one stream; the host never waits for it. A session keeps 512 to
1,024 bytes per parameter of its tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mulo import MuLO, Stack, Weights, checkpoints, export
from mulo.export import onnxruntime
from mulo.features import Accumulators, Dims, Numbers

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


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
        **sizes: int,  # fixed sizes b, e, m, n
    ):
        self.device, settings = torch.device(device), {}
        self.on_cpu = self.device.type == "cpu"
        if self.device.type not in PROVIDERS:
            raise ValueError(f"onnxruntime has no '{device}': move the model to the CPU or CUDA.")
        options, self.run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # cores for torch
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        if self.on_cpu:
            options.log_severity_level = 4  # errors are raised; on CUDA, warnings help
        else:  # TF32 has 10 bits of mantissa; by default the arena doubles
            settings = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
            settings["device_id"] = str(self.device.index or 0)
            settings["user_compute_stream"] = str(stream_on(self.device).cuda_stream)
            self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        provider = PROVIDERS[self.device.type]
        arguments = graph, options, [(provider, settings)]
        # onnxruntime changes the thread's current device; this context restores it (-1: none).
        with torch.cuda.device(-1 if self.on_cpu else self.device):
            self.session = onnxruntime.InferenceSession(*arguments, enable_fallback=False)
        if (providers := self.session.get_providers())[0] != provider:
            fix = "install onnxruntime-gpu with its CUDA 13 and cuDNN 9, or train on the CPU"
            raise RuntimeError(f"onnxruntime cannot use CUDA here, only {providers}: {fix}.")
        self.inputs = {x.name: tuple(x.shape) for x in self.session.get_inputs()}
        self.outputs = {x.name: tuple(x.shape) for x in self.session.get_outputs()}
        self.binding = self.session.io_binding()

    def check(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        """Raise unless these are inputs of the graph; return the sizes that are not fixed."""
        if wrong := sorted(inputs.keys() ^ self.inputs.keys()):
            raise ValueError(f"inputs must be {list(self.inputs)}: {wrong} are missing or unknown.")
        sizes = {}
        for name, x in inputs.items():
            pairs = zip(self.inputs[name], x.shape, strict=False)
            sizes = {d: n for d, n in pairs if isinstance(d, str)} | sizes
            shape = tuple(sizes.get(d, d) for d in self.inputs[name])
            right_kind = x.dtype == torch.float32 and x.device == self.device
            if tuple(x.shape) != shape or not (right_kind and x.is_contiguous() and x.numel()):
                wanted = f"contiguous float32 on {self.device}, not empty, {shape}"
                raise ValueError(f"{name} must be {wanted}, not {x.dtype}, {tuple(x.shape)}.")
        return sizes

    def run(self, inputs: dict[str, Tensor], inplace: Iterable[str] = ()) -> dict[str, Tensor]:
        """Run the graph; the states named in `inplace` are overwritten by their new values."""
        sizes = self.check(inputs)
        outputs = {f"new_{k}": inputs[k] for k in inplace}
        for k in self.outputs.keys() - outputs.keys():
            shape = [sizes.get(d, d) for d in self.outputs[k]]
            outputs[k] = torch.empty(shape, dtype=torch.float32, device=self.device)
        where = self.device.type, self.device.index or 0, np.float32
        for name, x in inputs.items():
            self.binding.bind_input(name, *where, tuple(x.shape), x.data_ptr())
        for name, x in outputs.items():
            self.binding.bind_output(name, *where, tuple(x.shape), x.data_ptr())
        if self.on_cpu:
            self.session.run_with_iobinding(self.binding, self.run_options)
            return outputs
        ours, theirs = torch.cuda.current_stream(self.device), stream_on(self.device)
        with torch.cuda.device(self.device):  # onnxruntime changes the thread's current device
            theirs.wait_stream(ours)  # order the streams on the GPU; the host waits for neither
            self.session.run_with_iobinding(self.binding, self.run_options)
            ours.wait_stream(theirs)  # torch may then reuse the memory of the inputs
        return outputs


def graph_axes(x: Tensor, dims: Dims) -> Tensor:
    """A view of a tensor or state with its axes m and n last, as in the graphs."""
    return x.movedim(dims, (-2, -1)) if dims else x


class OrtMuLO(MuLO):
    """`mulo.MuLO` whose step runs in onnxruntime; `exported` is the .json that export.py wrote."""

    def __init__(
        self,
        params: Iterable,
        exported: str | Path,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        num_steps: int | None = None,
    ):
        about, files = export.read(exported)
        name = about["name"]
        self.graphs = {kind: files.get(f"{name}.{kind}.onnx") for kind in ("vector", "tensor")}
        if None in self.graphs.values():
            raise ValueError(f"{exported} lists no .onnx files: export it again.")
        self._sessions: dict[tuple, Session] = {}
        lo = checkpoints.load(Path(exported).with_name(f"{name}.pt"))
        super().__init__(params, lo, lr, weight_decay, num_steps, backend="folded")

    def session(self, kind: str, p: Tensor) -> Session:
        """The graph of this kind, opened when it is first needed; on CUDA, for the shape of p."""
        axes = "bemn" if kind == "tensor" else "bn"
        sizes = {} if p.device.type == "cpu" else dict(zip(axes, p.shape, strict=True))
        key = kind, p.device, *sizes.values()
        if key not in self._sessions:
            self._sessions[key] = Session(self.graphs[kind], p.device, **sizes)
        return self._sessions[key]

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"graphs": self.graphs, "_sessions": {}}

    def _stack(self, p: nn.Parameter, group: dict) -> Stack:
        """As in MuLO, but with state in the graphs' memory layout: steps need not transpose it."""
        stack = super()._stack(p, group)
        if stack.dims is None or graph_axes(stack.acc.M, stack.dims).is_contiguous():
            return stack
        for k, x in stack.acc._asdict().items():
            x = graph_axes(x, stack.dims).contiguous()
            self.state[p][k] = x.movedim((-2, -1), stack.dims)[0]
        return super()._stack(p, group)

    def _advance(
        self,
        _,
        weights: Weights,
        stacks: list[Stack],
        grads: list[Tensor],
        numbers: Numbers,
        nonfinite: Tensor,
    ) -> None:
        """Run the graphs on all tensors; count NaN and infinite gradients in `nonfinite`."""
        if any(x.shards or x.p.dtype == torch.float64 for x in stacks):
            fix = "use mulo.MuLO for sharded or float64 parameters"
            raise RuntimeError(f"exported graphs take whole tensors in float32: {fix}.")
        numbers = weights.scaled(numbers)
        for n, (stack, g) in enumerate(zip(stacks, grads, strict=True)):
            inputs = {k: row[0, n : n + 1] for k, row in numbers._asdict().items()}
            if self.lo.config.eps != "fan_in":
                del inputs["eps_scale"]
            if self.lo.config.net == "velo":
                inputs |= {k: w[0, n : n + 1].contiguous() for k, w in weights.phi.items()}
                inputs["features"] = torch.zeros(1, 12, dtype=torch.float32, device=g.device)
            self._run(stack, g.view_as(stack.p), inputs)
            nonfinite += (~g.isfinite()).sum()

    def _run(self, stack: Stack, g: Tensor, inputs: dict[str, Tensor]) -> None:
        """Run a tensor's graph, with the other inputs that are given, and store its results."""
        p, g = (graph_axes(x[0], stack.dims) for x in (stack.p, g))  # (..., m, n) or (n,)
        shape = (1, -1, *p.shape[-2:]) if stack.dims else (1, -1)
        inputs |= {k: x.float().contiguous().view(shape) for k, x in (("p", p), ("g", g))}
        for k, x in stack.acc._asdict().items():
            if stack.dims:
                lead = x.shape[: x.ndim - p.ndim]  # (1, 3); V: (1,)
                x = graph_axes(x, stack.dims)
                x = x.view(*lead, -1, *x.shape[-2:])
            inputs[k] = x
        # The graph reads a state only to compute its new value, which may overwrite it, unless r
        # and c are one array, as in vectors.
        inplace = Accumulators._fields if stack.dims else ("M", "V")
        session = self.session("tensor" if stack.dims else "vector", inputs["p"])
        outputs = session.run(inputs, inplace)
        p.copy_(outputs["new_p"].view(p.shape))
        for k in set(Accumulators._fields) - set(inplace):
            inputs[k].copy_(outputs[f"new_{k}"])

    def _param_scale(self, mean_square: Tensor) -> Tensor:
        return torch.ones_like(mean_square)  # the graph multiplies by RMS(W)
