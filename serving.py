"""Exported learned optimizers in onnxruntime: `Session`, one graph, and `OrtMuLO`, an Optimizer.

    opt = OrtMuLO(mulo.param_groups(model, roles), "exported/mulo_m.json")
    ...; loss.backward(); opt.step(); opt.zero_grad()

`OrtMuLO` has the param groups and the state_dict of `mulo.MuLO`, so a run may change from one to
the other. State is kept in the graphs' memory layout: a step transposes only parameters and
gradients. VeLO's LSTM stays in torch: its loss features cancel in float32.

onnxruntime broadcasts, accepts empty tensors, and falls back to the CPU silently where it cannot
use CUDA. So `Session` checks its inputs, and where it runs. onnxruntime-gpu 1.31 needs CUDA 13 and
cuDNN 9. It works on a torch stream, so that only the checks of every 100th step sync.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from mulo import MuLO, Stack, Weights, checkpoints, export
from mulo.features import Accumulators, Dims, Numbers

TOGETHER = 2**18  # entries that tensors of one call have together; larger tensors go alone


def copies(graph: onnx.GraphProto) -> list[str]:
    """The copies around nodes that have no CUDA kernel, each by the operators at its CPU end."""
    found = []
    for node in graph.node:
        if node.op_type == "MemcpyToHost":
            found.append(" and ".join(x.op_type for x in graph.node if node.output[0] in x.input))
        elif node.op_type == "MemcpyFromHost":
            found.append(" and ".join(x.op_type for x in graph.node if node.input[0] in x.output))
        for attribute in node.attribute:
            found += copies(attribute.g)  # the body of a Loop
    return found


class Session:
    """One exported ONNX graph on the CPU or on CUDA: tensors by name in, new tensors out."""

    def __init__(
        self,
        path: str | Path,
        device: str | torch.device = "cpu",
        threads: int | None = None,
        block: int | None = None,  # entries that the network works on at a time; all on CUDA
    ):
        self.device, self.stream = torch.device(device), None
        provider, settings = export.PROVIDERS.get(self.device.type), {}
        cuda = self.device.type == "cuda"
        if provider is None:
            raise ValueError(f"onnxruntime has no device '{self.device}': use 'cpu' or 'cuda'.")
        options, self.run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
        options.log_severity_level = 4  # errors are raised
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch works too
        if block or cuda:
            self.block = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([block or 2**40]))
            options.add_initializer("block", self.block)
        if cuda:
            settings["use_tf32"] = "0"  # TF32, the default, has 10 bits of mantissa
        if cuda and torch.cuda.is_available():  # torch's default stream is 0, here that means none
            self.stream = torch.cuda.Stream(self.device)
            self.device = self.stream.device  # with its index
            settings["device_id"] = str(self.device.index)
            settings["user_compute_stream"] = str(self.stream.cuda_stream)
            self.run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        with tempfile.TemporaryDirectory() as folder:
            if cuda:
                options.optimized_model_filepath = str(Path(folder, "placed.onnx"))
            self.session = export.open_onnx(path, options, provider, settings)
            if found := cuda and copies(onnx.load(options.optimized_model_filepath).graph):
                what = f"copies {len(found)} values per call between CPU and GPU"
                near = ", ".join(sorted(set(found)))
                warnings.warn(f"onnxruntime {what} in {path}, next to {near}.", stacklevel=4)
        meta = self.session.get_modelmeta()
        export.read_config(meta.custom_metadata_map.get("mulo", ""), path)
        self.inputs = {x.name: tuple(x.shape) for x in self.session.get_inputs()}
        self.outputs = {x.name: tuple(x.shape) for x in self.session.get_outputs()}
        self.binding = self.session.io_binding()

    def check(self, inputs: dict[str, Tensor]) -> dict[str, int]:
        """Raise unless these are inputs of the graph; returns the sizes b, e, m, n and T."""
        if odd := sorted(inputs.keys() ^ self.inputs.keys()):
            raise ValueError(f"inputs must be {list(self.inputs)}: {odd} are missing or unknown.")
        sizes: dict[str, int] = {}
        for name, x in inputs.items():
            shape = self.inputs[name]
            for d, size in zip(shape, x.shape, strict=False):
                if isinstance(d, str):
                    sizes.setdefault(d, size)
            fits = tuple(x.shape) == tuple(sizes.get(d, d) for d in shape) and x.numel()
            right_kind = x.dtype == torch.float32 and x.device == self.device
            if not (fits and right_kind and x.is_contiguous()):
                what = f"contiguous float32 on {self.device}, not empty and {shape} with {sizes}"
                found = f"{x.dtype} on {x.device}, {tuple(x.shape)}"
                raise ValueError(f"{name} must be {what}, not {found}.")
        if sizes.get("m", 0) > sizes.get("n", 0):
            wrong = f"m = {sizes['m']} exceeds n = {sizes['n']}"
            raise ValueError(f"{wrong}: transpose, so that the largest axis is last.")
        return sizes

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        sizes = self.check(inputs)
        outputs = {
            k: torch.empty([sizes.get(d, d) for d in s], dtype=torch.float32, device=self.device)
            for k, s in self.outputs.items()
        }
        where = self.device.type, self.device.index or 0, np.float32
        for name, x in inputs.items():
            self.binding.bind_input(name, *where, tuple(x.shape), x.data_ptr())
        for name, x in outputs.items():
            self.binding.bind_output(name, *where, tuple(x.shape), x.data_ptr())
        if self.stream:  # order the two streams on the GPU; the host waits for neither
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.session.run_with_iobinding(self.binding, self.run_options)
        if self.stream:  # so torch may reuse the memory of the inputs, too
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
        found = export.sidecars(exported)
        if len(found) != 1:
            raise ValueError(f"{exported} has {len(found)} optimizers: give the .json of one.")
        [(self.path, self.about)] = found  # with digests: later changes of files are refused
        self.device, self.threads = torch.device(device), threads
        self._sessions: dict[str, Session] = {}
        lo = checkpoints.load(self._file("pt"))
        super().__init__(params, lo, lr, weight_decay, num_steps, backend="folded")
        self.device = self.session("vector").device  # opened now, so that errors come early

    def _file(self, suffix: str) -> Path:
        return export.checked(self.path.parent, f"{self.about['name']}.{suffix}", self.about)

    def session(self, kind: str) -> Session:
        """The graph of this kind, opened when it is first needed."""
        if kind not in self._sessions:
            self._sessions[kind] = Session(self._file(f"{kind}.onnx"), self.device, self.threads)
        return self._sessions[kind]

    def __getstate__(self) -> dict:
        names = ("path", "about", "device", "threads")
        return super().__getstate__() | {k: getattr(self, k) for k in names} | {"_sessions": {}}

    def _with_gradients(self) -> list[tuple[nn.Parameter, dict]]:
        """Check the parameters; this comes before anything is changed."""
        found = super()._with_gradients()
        for p, _ in found:
            if p.device != self.device:
                where = f"a parameter is on {p.device}, the optimizer on '{self.device}'"
                raise RuntimeError(f"{where}: move the model, or pass OrtMuLO the device.")
            if p.dtype == torch.float64:
                fix = "use mulo.MuLO for float64 parameters"
                raise RuntimeError(f"exported graphs are float32: {fix}.")
            self.session("tensor" if p.ndim > 1 else "vector")
        often = self.device.type == "cpu" or self.param_groups[0]["step"] % 100 == 0  # it syncs
        if found and often and not all_finite([p.detach() for p, _ in found]):
            raise ValueError("a parameter has NaN or infinite entries: go back to a checkpoint.")
        return found

    def _stack(self, p: nn.Parameter, group: dict) -> Stack:
        """With state in the memory layout of the graphs, so that steps need not transpose it."""
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
        groups: dict[tuple, list[int]] = {}
        for n, x in enumerate(stacks):
            groups.setdefault(in_graph(x.p, x.dims).shape, []).append(n)
        for shape, members in groups.items():
            many = max(1, TOGETHER // math.prod(shape))
            for start in range(0, len(members), many):
                self._run(stacks, grads, weights, numbers, members[start : start + many])
        if self.device.type == "cpu" and all_finite(grads):
            return 0
        return sum((~g.isfinite()).sum() for g in grads)

    def _run(
        self,
        stacks: list[Stack],
        grads: list[Tensor],
        weights: Weights,
        numbers: Numbers,
        index: list[int],  # of tensors with one shape in the graph
    ) -> None:
        """Run the graph once for the tensors of this index, and store its results."""
        some, config = [stacks[n] for n in index], self.lo.config
        kind = "tensor" if some[0].dims else "vector"
        views = {k: [in_graph(getattr(x.acc, k), x.dims) for x in some] for k in "MVrc"}
        views["p"] = [in_graph(x.p, x.dims) for x in some]
        given = views | {"g": [in_graph(grads[n], stacks[n].dims) for n in index]}

        def gather(parts: list[Tensor]) -> Tensor:
            if len(parts) > 1:
                x = torch.cat(parts).float()
            else:  # torch is fast if it transposes two axes
                x = parts[0].squeeze().float().contiguous().view(parts[0].shape)
            lead = x.ndim - some[0].p.ndim + 1  # e is all axes between these and m
            return x if kind == "vector" else x.reshape(*x.shape[:lead], -1, *x.shape[-2:])

        inputs = {k: gather(parts) for k, parts in given.items()}
        for k, x in numbers._asdict().items():
            if k != "eps_scale" or config.eps == "fan_in":
                inputs[k] = torch.cat([x[0, n : n + 1] for n in index])  # a list index would sync
        if config.net == "velo":
            phi = weights.phi.items()
            inputs |= {k: torch.cat([w[0, n : n + 1] for n in index]) for k, w in phi}
            inputs["features"] = inputs["p"].new_zeros(len(index), 12)
        outputs = self.session(kind).run(inputs)
        for k, old in views.items():
            new = outputs[f"new_{k}"].reshape(-1, *old[0].shape[1:])
            if len(old) > 1:
                torch._foreach_copy_(old, new.split(1))
            else:  # torch is fast if the target is contiguous
                a, b = old[0].squeeze(), new.squeeze()
                a.T.copy_(b.T) if a.ndim == 2 else a.copy_(b)

    def _param_scale(self, x: Stack) -> Tensor:
        return torch.ones(1, device=self.device)  # the graph multiplies by RMS(W)


if __name__ == "__main__":
    raise SystemExit(
        "serving.py is a module, not a command: use `from mulo.serving import OrtMuLO`."
    )
