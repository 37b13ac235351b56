"""The optimizer step as graphs: the modules that `export.py` writes.

    step = make(mulo.load("mulo_m"), "matrix")     # an nn.Module: state in, state out

Every graph takes a batch of b equal-shaped tensors; b, m, n and e are free. Kinds of step:

    matrix   param (b, m, n): axis n is d0, the larger one ("out" if they tie; see features.py)
    tall     param (b, m, n): axis m is d0, as in a torch weight (out, in) with out >= in
    tensor   param (b, e, m, n): n is d0, m is d1, e is all other axes of a tensor of rank 3 or more
    vector   param (b, n): rank 0 and 1

`row` goes with axis m and `col` with axis n: r and c of features.py, or c and r in a tall graph.
Beside the steps there are `net`, the bare network, and for VeLO, whose step takes its network as
inputs, `stats` (what the LSTM sees of a tensor) and `hyper` (the LSTM, which makes the networks).
TorchScript and torch.export take a graph's `forward`, ONNX the pieces of it: see `onnxgraphs.py`.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import contextmanager, redirect_stdout

import torch
from torch import Tensor, nn
from torch.export import Dim

import features
import lo as lo_module
import rule
from features import Accumulators, Eps, LossBuffer, Rates, Scales
from lo import LO, LOConfig
from rule import Folded, Net

STEPS = ("matrix", "tall", "tensor", "vector")
USES = {
    "matrix": "rank 2 with m <= n",
    "tall": "rank 2 with m >= n, as torch's (out, in) if equal",
    "tensor": "rank 3 or more: n the largest axis, m the next, e the others",
    "vector": "rank 0 and 1",
    "net": "features -> d, m",
    "stats": "what the LSTM sees of a tensor",
    "hyper": "the LSTM over all tensors, which makes their networks",
}
DIMS = {"matrix": (-2, -1), "tall": (-1, -2), "tensor": (-2, -1), "vector": None}
CHATTER = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")


def kinds(config: LOConfig) -> tuple[str, ...]:
    """The graphs that make up one learned optimizer."""
    return (*STEPS, "net") + (("stats", "hyper") if config.net == "velo" else ())


def make(lo: LO, kind: str) -> Graph:
    return {"net": Bare, "stats": Stats, "hyper": Hyper}.get(kind, Step)(lo, kind)


class Graph(nn.Module):
    """A module with named inputs (with the sizes of their axes: a number or a free symbol)."""

    inputs: dict[str, tuple]
    outputs: tuple[str, ...]

    def __init__(self, lo: LO, kind: str, **buffers: Tensor):
        super().__init__()
        self.config, self.kind = lo.config, kind
        for name, x in buffers.items():
            self.register_buffer(name, x.detach().clone().contiguous())

    def sizes(self) -> dict[str, int]:
        """Example sizes, all different and none of them a size that is fixed."""
        fixed = {d for shape in self.inputs.values() for d in shape} | {self.config.hidden_size}
        free = [k for k in (3, 5, 7, 11, 13, 19, 23, 31, 37) if k not in fixed]
        order = "benmT" if self.kind == "tall" else "bemnT"
        return dict(zip(order, free, strict=False))

    def size(self, name: str, outputs: Sequence[Tensor]) -> Tensor:
        """What an error of this output is measured by: its largest entry."""
        return outputs[self.outputs.index(name)].abs().max()

    def example(self) -> tuple[Tensor, ...]:
        sizes = self.sizes()
        return tuple(torch.rand([sizes.get(d, d) for d in s]) for s in self.inputs.values())


def generated(config: LOConfig, symbol: str) -> dict[str, tuple]:
    """The weights that VeLO's hypernetwork makes for each of the tensors along axis `symbol`."""
    shapes, sizes = {}, config.layer_sizes()
    for k in range(config.hidden_layers + 1):
        shapes |= {f"w{k}": (symbol, sizes[k], sizes[k + 1]), f"b{k}": (symbol, sizes[k + 1])}
    return shapes


class Step(Graph):
    """The whole step, by rule.step: features, network, update; state in and state out."""

    outputs = tuple(f"new_{x}" for x in ("param", "second_moment", "momentum", "row", "col"))

    def __init__(self, lo: LO, kind: str):
        velo = lo.config.net == "velo"
        if velo:
            rates, weights = rule.rates_of({"w0": torch.zeros(1)}), {}
        else:  # decays are settled here: exp in another runtime would cost 1 - beta its digits
            net = rule.prepare(lo.config, lo_module.stacked(lo))
            rates, names = net.rates, ("dense", "row", "col", "time", "bias")
            weights = {f"phi_{k}": getattr(net, k) for k in names}
            for k, pair in enumerate(net.layers):
                weights |= dict(zip((f"phi_w{k}", f"phi_b{k}"), pair, strict=True))
            weights["timescales"] = torch.tensor(features.TIMESCALES, dtype=torch.float32)
        rates = {f"rate_{k}": x for k, x in rates._asdict().items()}
        super().__init__(lo, kind, one=torch.ones(1), **rates, **weights)
        self.dims = DIMS[kind]
        lead = {"tensor": ("e",)}.get(kind, ())
        m, n = ((*lead, "m"), (*lead, "n")) if self.dims else (("n",), ("n",))
        shape = lead + (("m", "n") if self.dims else ("n",))
        self.inputs = dict.fromkeys(("param", "grad", "second_moment"), ("b", *shape))
        self.inputs |= {"momentum": ("b", 3, *shape), "row": ("b", 3, *m), "col": ("b", 3, *n)}
        self.inputs |= {"step": (), "lr_scale": ("b",)}
        if lo.config.eps == "fan_in":
            self.inputs["fan_in"] = ("b",)
        if velo:
            self.inputs |= generated(lo.config, "b")

    def net(self, step: Tensor, more: dict[str, Tensor]) -> Net:
        """The network at this time; VeLO's comes in as inputs."""
        rates = Rates(self.rate_M, self.rate_V, self.rate_rc)
        if self.config.net == "velo":
            phi = {k: w for k, w in more.items() if k[0] in "wb"}
            return dataclasses.replace(rule.prepare(self.config, phi), rates=rates)
        layers = range(self.config.hidden_layers)
        net = Net(
            self.config,
            rates,
            *(getattr(self, f"phi_{k}") for k in ("dense", "row", "col", "time", "bias")),
            [(getattr(self, f"phi_w{k}"), getattr(self, f"phi_b{k}")) for k in layers],
        )
        return net.at(step).settled(self.timescales)

    def turn(self, row: Tensor, col: Tensor) -> tuple[Tensor, Tensor]:
        """(row, col) as (r, c), with the averaged axis kept as size 1."""
        if self.dims is None:
            return row, col
        row, col = row.unsqueeze(-1), col.unsqueeze(-2)
        return (col, row) if self.kind == "tall" else (row, col)

    def turn_back(self, r: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        if self.dims is None:
            return r, c
        row, col = (c, r) if self.kind == "tall" else (r, c)
        return row.squeeze(-1), col.squeeze(-2)

    def eps_scale(self, more: dict[str, Tensor]) -> Tensor:
        return 1 / more["fan_in"] if "fan_in" in more else self.one

    def rate(self, lr_scale: Tensor, param: Tensor) -> Tensor:
        if not self.config.param_scale_mult:
            return lr_scale
        return lr_scale * features.param_scale(param)

    def forward(
        self,
        param: Tensor,
        grad: Tensor,
        second_moment: Tensor,
        momentum: Tensor,
        row: Tensor,
        col: Tensor,
        step: Tensor,
        lr_scale: Tensor,
        *more: Tensor,
    ) -> tuple[Tensor, ...]:
        more = dict(zip(list(self.inputs)[8:], more, strict=True))
        acc, new_param = rule.step(
            self.net(step, more),
            Accumulators(momentum, second_moment, *self.turn(row, col)),
            param,
            grad,
            self.rate(lr_scale, param),
            self.dims,
            eps_scale=self.eps_scale(more),
        )
        return new_param, acc.V, acc.M, *self.turn_back(acc.r, acc.c)

    # The same in four pieces, for ONNX: tensors by name in, tensors by name out.

    def accumulate(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Everything but the dense features: new accumulators, and what those features need."""
        acc = Accumulators(x["momentum"], x["second_moment"], *self.turn(x["row"], x["col"]))
        _, acc, _, g, s = rule.accumulate(
            self.net(x["step"], x), acc, x["param"], x["grad"], self.dims, self.eps_scale(x)
        )
        row, col = self.turn_back(acc.r, acc.c)
        new = {"new_second_moment": acc.V, "new_momentum": acc.M, "new_row": row, "new_col": col}
        over = s.grad[::-1] if self.kind == "tall" else s.grad
        new |= {"g": g, "over_m": over[0], "over_n": over[1], "eps_V": s.eps_V}
        if self.config.eps == "relative":
            new |= {"unit_V": s.unit_V, "eps_M": s.eps_M}
        return new

    def dense(self, x: dict[str, Tensor]) -> list[Tensor]:
        """The dense features of a block, (b, 1 or 3, [e,] rows, n) each."""
        pair = (x["over_m"], x["over_n"])  # in either order: they are multiplied
        s = Scales(x.get("unit_V", 1.0), x.get("eps_M", x["eps_V"]), x["eps_V"], pair, pair)
        M, V = x["new_momentum"], x["new_second_moment"]
        kind = self.config.feature_set
        return features.dense_features(x["param"], x["g"], M, V, s, kind)

    def squares(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums of squares of the dense features of a block, (b, D)."""
        sums = torch.cat([part.square().sum(-1) for part in self.dense(x)], 1)  # one axis a time
        while sums.ndim > 2:
            sums = sums.sum(-1)
        return {"squares": sums}

    def fold(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """The network for this tensor, from the sums of squares of all blocks, (blocks, b, D)."""
        ms = x["squares"].permute(1, 2, 0).sum(-1) / x["param"][0].numel()
        eps = Eps(self.config.eps, self.config.eps_rms, self.eps_scale(x))
        r, c = self.turn(x["new_row"], x["new_col"])
        rate = self.rate(x["lr_scale"], x["param"])
        folded = rule.fold(self.net(x["step"], x), ms, r, c, rate, eps)
        first = (folded.col, folded.row) if self.kind == "tall" else (folded.row, folded.col)
        new = {"first_m": first[0], "first_n": first[1], "fold_w0": folded.w0}
        for k, pair in enumerate(folded.layers, 1):
            new |= dict(zip((f"fold_w{k}", f"fold_b{k}"), pair, strict=True))
        return new

    def advance(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Network and update of a block."""
        layers = range(1, self.config.hidden_layers + 1)
        layers = [(x[f"fold_w{k}"], x[f"fold_b{k}"]) for k in layers]
        net = Folded(x["fold_w0"], x["first_m"], x["first_n"], layers)
        d, e_m = net.rest(net.first(torch.cat(self.dense(x), 1), net.row, net.col))
        return {"new_param": x["param"] - d * e_m}


class Bare(Graph):
    """The bare network: features -> d, m."""

    outputs = ("d", "m")

    def __init__(self, lo: LO, kind: str):
        velo = lo.config.net == "velo"
        super().__init__(lo, kind, **({} if velo else lo_module.stacked(lo)))
        self.inputs = {"features": (*(("b",) if velo else ()), "n", lo.config.num_features)}
        if velo:
            self.inputs |= generated(lo.config, "b")

    def forward(self, features: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        velo = self.config.net == "velo"
        phi = (
            dict(zip(list(self.inputs)[1:], more, strict=True))
            if velo
            else dict(self.named_buffers())
        )
        A = features if velo else features.unsqueeze(0)
        y = lo_module.mlp(phi, A, self.config.hidden_layers)
        return (y if velo else y[0]).unbind(-1)


class Stats(Graph):
    """What VeLO's LSTM sees of each tensor, flattened: (b, 12)."""

    inputs = {  # noqa: RUF012
        "param": ("b", "n"),
        "second_moment": ("b", "n"),
        "momentum": ("b", 3, "n"),
        "rank": (),
    }
    outputs = ("features",)

    def forward(
        self, param: Tensor, second_moment: Tensor, momentum: Tensor, rank: Tensor
    ) -> tuple[Tensor]:
        return (features.tensor_features(param, momentum, second_moment, rank),)


class Hyper(Graph):
    """VeLO's LSTM over the T tensors of a net, and what it generates for each of them.

    While the loss does not change at all, its features are rounding errors divided by 1e-8, and
    differ between runtimes.
    """

    def __init__(self, lo: LO, kind: str):
        buffers = {f"phi_{k}": w for k, w in lo_module.stacked(lo).items() if k[-1] != "0"}
        buffers |= {f"phi_{k}": w for k, w in lo_module.stacked(lo).items() if "bank" in k}
        fractions = torch.tensor(features.FRACTIONS, dtype=torch.float32)
        super().__init__(lo, kind, fractions=fractions, **buffers)
        H = lo.config.lstm_hidden
        state = {"loss_means": (10,), "loss_low": (10,), "loss_count": ()}
        state |= {"hidden": ("T", H), "cell": ("T", H)}
        self.inputs = {"features": ("T", 12), "loss": (), "step": ("T",), "num_steps": ()}
        self.inputs |= {"loss_decay": (10,)} | state
        self.weights = tuple(generated(lo.config, "T"))
        self.outputs = (*(f"new_{k}" for k in state), "alpha", *self.weights)

    def forward(
        self,
        features_: Tensor,
        loss: Tensor,
        step: Tensor,
        num_steps: Tensor,
        loss_decay: Tensor,
        loss_means: Tensor,
        loss_low: Tensor,
        loss_count: Tensor,
        hidden: Tensor,
        cell: Tensor,
    ) -> tuple[Tensor, ...]:
        memory = LossBuffer(loss_means, loss_low, loss_count)
        memory, x_loss = features.loss_features(memory, loss, loss_decay)
        x_time = features.fraction_features(step, num_steps, self.config.spec, self.fractions)
        x = torch.cat([x_time, x_loss.expand(step.shape[0], -1), features_], -1)  # (T, 30)
        phi = {k.removeprefix("phi_"): w for k, w in self.named_buffers()}
        h, cell = lo_module.lstm_step(phi, x[None], hidden[None], cell[None])
        weights, alpha = lo_module.hypernetwork(self.config, phi, h)
        return (*memory, h[0], cell[0], alpha[0], *(weights[k][0] for k in self.weights))

    def size(self, name: str, outputs: Sequence[Tensor]) -> Tensor:
        """alpha is one number, whose terms may cancel: it is measured by these."""
        if name != "alpha":
            return super().size(name, outputs)
        h = outputs[self.outputs.index("new_hidden")].abs()
        weights = self.phi_alpha_w[0].abs().to(h.dtype), self.phi_alpha_b.abs().to(h.dtype)
        return (h @ weights[0] + weights[1]).max()


class Piece(nn.Module):
    """A method that takes and gives tensors by name, as a module that takes and gives tuples."""

    def __init__(self, owner: Step, method: str, names: Sequence[str]):
        super().__init__()
        self.owner, self.method, self.names = owner, method, names

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            getattr(self.owner, self.method)(dict(zip(self.names, inputs, strict=True))).values()
        )


# ---------------------------------------------------------------- torch.export


@contextmanager
def quiet():
    """Without the exporter's chatter."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def symbols(x: Tensor, sizes: dict[str, int]) -> tuple:
    """The axes of an example tensor: a symbol where its size is one of `sizes`."""
    names = {size: name for name, size in sizes.items()}
    return tuple(names.get(size, size) for size in x.shape)


def to_program(
    module: nn.Module, example: Sequence[Tensor], sizes: dict
) -> torch.export.ExportedProgram:
    """torch.export with all axes free whose example size is in `sizes`; each may also be 1."""
    free = {name: Dim(name, min=1) for name in sizes}
    dims = [{k: free[d] for k, d in enumerate(symbols(x, sizes)) if d in free} for x in example]
    named = 8 if isinstance(module, Step) else 1 if isinstance(module, Bare) else len(dims)
    named = 0 if isinstance(module, Piece) else named
    shapes = (*dims[:named], *((tuple(dims[named:]),) if named < len(dims) else ()))
    program = torch.export.export(module, tuple(example), dynamic_shapes=shapes)
    for node in program.graph.nodes:  # where the code stood on the machine that exported it
        node.meta = {k: v for k, v in node.meta.items() if k not in CHATTER}
    return program
