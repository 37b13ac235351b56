"""Functions compiled by Inductor, the compiler behind torch.compile, also for tensors of all sizes.

    tracer = Tracer(rank=2)
    m, n = tracer.symbols(2)
    with tracer.mode:
        x = torch.empty(m, n)                        # fake: only its type and its sizes
    double = tracer.compile(lambda x: 2 * x, x)
    [y] = double.run(torch.ones(3, 5))

`torch.compile` looks at every call for what may have changed since it traced a function, and at
every size. With small tensors that takes longer than the step. Here nothing can have changed but
sizes, which are symbols (`fused.py`) or known (`stacked.py`), so functions go to Inductor without
it. Inductor still checks shapes and strides. Two operations are ours: `mlp`, a network that is
written out, and `keep`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from unittest import mock

import torch
from sympy import Expr, S, Symbol
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor import ir, lowering
from torch._inductor.codegen import cpp
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V as virtual
from torch._inductor.virtualized import ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

# A fused multiply-add rounds once instead of twice, and takes half the time.
# Values are not stored, however often they are read, unless `keep` says so.
# What was compiled is kept on disk, for as long as this file is as it was.
OPTIONS = {
    "unsafe_marked_cacheable_functions": {
        "mulo.mlp": sha256(Path(__file__).read_bytes()).hexdigest()
    },
    "cpp.enable_floating_point_contract_flag": "fast",
    "realize_opcount_threshold": 10**6,
    "realize_reads_threshold": 10**6,
    "realize_acc_reads_threshold": 10**6,
}
CPU = {"cpp_wrapper": True}  # allocations and the calls of kernels in C++, too
aten = torch.ops.aten


def _nan_to_num(x: Tensor, *values: float) -> Tensor:
    """In one comparison, if all that is not finite becomes 0."""
    return torch.where(x.abs() < math.inf, x, 0.0) if values == (0.0,) * 3 else NotImplemented


TABLE = {
    # torch's own has two forms, the second to be exact for rates above 1/2, and computes both.
    aten.lerp.Tensor: lambda x, y, rate: x + rate * (y - x),
    aten.lerp_.Tensor: lambda x, y, rate: x.add_(rate * (y - x)),
    aten.nan_to_num.default: _nan_to_num,  # Inductor's asks one number after the other
}


class Tracer:
    """Makes symbols, and compiles functions of the fake tensors made with them."""

    def __init__(self, rank: int, quick_exp: bool = False):
        """Sums over tensors of up to this rank are done with care: see `_sums`; `_exp` is quick."""
        self.mode, self.rank = FakeTensorMode(shape_env=ShapeEnv()), rank
        self.exp = _exp if quick_exp else cpp.CppVecOverrides.exp

    def symbols(self, count: int) -> list[torch.SymInt]:
        """Integers that stand for all sizes of a stack (S, *shape)."""

        def symbol(k: int, hint: int) -> torch.SymInt:
            source, env = ConstantSource(f"size{k}"), self.mode.shape_env
            found = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            return env.create_symintnode(found, hint=hint, source=source)

        return [symbol(k, hint) for k, hint in enumerate((16, 96, 160, 9)[:count])]

    def compile(self, f: Callable, *args) -> Graph:
        with mock.patch.object(cpp.CppVecOverrides, "exp", staticmethod(self.exp)):
            return Graph(self.mode, TABLE | _sums(self.rank), f, *args)


class Graph:
    """A function of trees of tensors, compiled. `run` takes the tensors alone, each once, in the
    order of the trees, and returns those of the result in the same way."""

    made = 0  # in all, for tests

    def __init__(self, mode: FakeTensorMode, table: dict, f: Callable, *args):
        Graph.made += 1
        fakes = leaves(args)

        def flat(*tensors: Tensor) -> list[Tensor]:
            return leaves(f(*_replace(args, tensors)))

        with mode, enable_python_dispatcher():
            self.out = f(*args)  # the result, of fake tensors, for the graph after this one
            traced = make_fx(flat, table)(*fakes)
        self.constants = list(traced.buffers())  # tensors that f makes of numbers
        self.inputs = len(fakes)
        with (
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            torch._functorch.config.patch(enable_autograd_cache=False),  # it would skip _compile
            mock.patch.object(cpp, "stride_at_vec_range", _stride),
        ):
            options = OPTIONS | (CPU if fakes[0].device.type == "cpu" else {})
            compile_fx(traced, fakes, inner_compile=self._compile, config_patches=options)

    def _compile(self, *args, **fields) -> Callable:
        self.compiled = compile_fx_inner(*args, **fields)
        return self.compiled

    def run(self, *tensors: Tensor) -> Sequence[Tensor]:
        if len(tensors) != self.inputs:  # which C++ would not notice
            raise ValueError(f"the graph takes {self.inputs} tensors, not {len(tensors)}.")
        return self.compiled.current_callable([*self.constants, *tensors])  # not autograd's


def _stride(
    index: Expr, var: Symbol, length: int | None = None, f: Callable = cpp.stride_at_vec_range
) -> Expr:
    """How far apart in memory are the neighbours along a loop: not at all, for thousands of weights
    that do not depend on it. Inductor asks sympy, which takes longer than all the rest."""
    return f(index, var, length) if var in index.free_symbols else S.Zero


def _exp(x: object) -> str:
    """The exponential of a vector to 1e-6 of it, in line: the usual one, to 1e-7, is a call. Beyond
    88, and of NaN, it is 3e38, so it is not for losses."""
    return f"{x}.exp_u20()"


@torch.library.custom_op("mulo::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """x, stored: its readers do not compute it anew."""
    return x.clone()


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@lowering.register_lowering(torch.ops.mulo.keep.default, type_promotion_kind=None)
def _store(x: ir.TensorBox) -> ir.TensorBox:
    x.realize()
    return x


# Sums that are added to in turn: an addition waits four cycles, and two begin in each.
GROUP = 8


@torch.library.custom_op("mulo::mlp", mutates_args=())
def mlp(w: list[Tensor], b: list[Tensor], x: list[Tensor]) -> list[Tensor]:
    """y = w relu(... relu(w_0 x + b_0)) + b by planes: lists of x, y (S, *shape), w_k (S, m, n) and
    b_k (S, m, *shape) or what broadcasts to it.

    One operation of a graph, as thousands would take minutes to compile. It becomes part of the
    loop that x and y are part of, its products written out (`_write_out`).
    """
    y = torch.stack(x, 1)
    for k, (w_k, b_k) in enumerate(zip(w, b, strict=True)):
        y = torch.einsum("smn,sn...->sm...", w_k, y.relu() if k else y) + b_k
    return [plane.clone(memory_format=torch.contiguous_format) for plane in y.unbind(1)]


@mlp.register_fake
def _(w: list[Tensor], b: list[Tensor], x: list[Tensor]) -> list[Tensor]:
    return [x[0].new_empty(x[0].shape) for _ in range(w[-1].shape[1])]


@lowering.register_lowering(torch.ops.mulo.mlp.default, type_promotion_kind=None)
def _write_out(w: list, b: list, x: list) -> list:
    """The network at an index. Each plane is used for a GROUP of sums at a time, which then need
    one load to a product: that of the weight."""
    size, first = x[0].get_size(), x[0]
    outputs = [int(w_k.get_size()[1]) for w_k in w]
    b = [lowering.expand(b_k, [size[0], m, *size[1:]]) for b_k, m in zip(b, outputs, strict=True)]
    layers = [[y.make_loader() for y in layer] for layer in zip(w, b, strict=True)]
    inputs, seen = [x_k.make_loader() for x_k in x], []

    def write(s, *rest) -> list:
        x = [load([s, *rest]) for load in inputs]
        for k, ((weight, bias), m) in enumerate(zip(layers, outputs, strict=True)):
            x, y = [ops.relu(x_n) for x_n in x] if k else x, []
            for group in (range(m)[j : j + GROUP] for j in range(0, m, GROUP)):
                chains = max(1, GROUP // len(group))  # of each sum, in which it waits for itself
                sums = [[bias([s, j, *rest])] for j in group]
                for n, x_n in enumerate(x):
                    for y_j, j in zip(sums, group, strict=True):
                        part = ops.mul(weight([s, j, n]), x_n)
                        if len(y_j) < chains:
                            y_j.append(part)
                        else:
                            y_j[n % chains] = ops.add(y_j[n % chains], part)
                y += [functools.reduce(ops.add, y_j) for y_j in sums]
            x = y
        return x

    def plane(index: Sequence, j: int) -> object:  # written once for all planes
        handler = virtual.get_ops_handler()
        if not seen or seen[0] is not handler or seen[1] != index:
            seen[:] = handler, index, write(*index)
        return seen[2][j]

    return [
        ir.Pointwise.create(
            device=first.get_device(),
            dtype=first.get_dtype(),
            inner_fn=functools.partial(plane, j=j),
            ranges=size,
        )
        for j in range(outputs[-1])
    ]


def _sums(rank: int) -> dict:
    """Sums and means of tensors of up to a rank, in float64: one number after the other, as loops
    add them, thousands of float32 numbers lose digits."""

    def exact(op: Callable) -> Callable:
        def f(x: Tensor, *args, dtype: torch.dtype | None = None) -> Tensor:
            if x.ndim > rank or dtype is not None or not x.is_floating_point():
                return NotImplemented  # as it is
            return op(x, *args, dtype=torch.float64).to(x.dtype)

        return f

    return {op: exact(op) for op in (aten.sum.dim_IntList, aten.mean.dim)}


def leaves(tree: object) -> list[Tensor]:
    """Each tensor of a tree, once."""
    return list({id(x): x for x in tree_leaves(tree) if isinstance(x, Tensor)}.values())


def _replace(tree: object, tensors: Sequence[Tensor]) -> object:
    """The tree with other tensors, given in the order of `leaves`."""
    now = dict(zip(map(id, leaves(tree)), tensors, strict=True))
    return tree_map(lambda x: now.get(id(x), x), tree)
