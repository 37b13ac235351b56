"""Functions compiled by Inductor, the compiler behind torch.compile, for tensors of all sizes.

    tracer = Tracer(rank=2)
    m, n = tracer.symbols("size", 2)
    with tracer.mode:
        x = torch.empty(m, n)                        # fake: only its type and its sizes
    double = tracer.compile(lambda x: 2 * x, x)
    [y] = double.run(torch.ones(3, 5))

`torch.compile` looks at every call for what may have changed since it traced a function, and at
every size. With small tensors that takes longer than the step. In `fused.py` nothing can have
changed but sizes, and they are symbols, so its functions go to Inductor without it. Inductor still
checks shapes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V as virtual
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

# A fused multiply-add rounds once instead of twice, and takes half the time.
# Values are not to be stored, however often they are read: the network's planes.
OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    "realize_opcount_threshold": 10**6,
    "realize_reads_threshold": 10**6,
    "realize_acc_reads_threshold": 10**6,
}
CPU = {"cpp_wrapper": True}  # allocations and the calls of kernels in C++, too
aten = torch.ops.aten
# torch's own has two forms, the second to be exact for rates above 1/2, and computes both.
LERP = {
    aten.lerp.Tensor: lambda x, y, rate: x + rate * (y - x),
    aten.lerp_.Tensor: lambda x, y, rate: x.add_(rate * (y - x)),
}


class Tracer:
    """Makes symbols, and compiles functions of the fake tensors made with them."""

    def __init__(self, rank: int):
        """Sums over tensors of up to this rank are done with care: see `_sums`."""
        self.mode, self.rank = FakeTensorMode(shape_env=ShapeEnv()), rank

    def symbols(self, name: str, count: int) -> list[torch.SymInt]:
        """Integers that stand for all sizes of a stack (S, *shape), or for strides."""

        def symbol(k: int, hint: int) -> torch.SymInt:
            source, env = ConstantSource(f"{name}{k}"), self.mode.shape_env
            found = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
            return env.create_symintnode(found, hint=hint, source=source)

        return [symbol(k, hint) for k, hint in enumerate((16, 96, 160, 9)[:count])]

    def block(self, thin: object, thick: object, rank: int) -> tuple[object, object]:
        """The same trees for a block of a tensor, cut along any axis. `thin` tensors are to be
        copied when it is cut; `thick` ones are not, and so have strides of their own."""
        sizes = self.symbols("block", rank + 1)[1:]
        first, *strides = self.symbols("stride", rank)

        def cut(x: Tensor) -> Tensor:
            ends = zip(x.shape[-rank:], sizes, strict=True)
            return x.new_empty((*x.shape[:-rank], *(1 if n == 1 else size for n, size in ends)))

        def strided(x: Tensor) -> Tensor:
            return cut(x).as_strided(cut(x).shape, (*[first] * (x.ndim - rank), *strides, 1))

        with self.mode:
            return (
                _replace(thin, [cut(x) for x in _tensors(thin)]),
                _replace(thick, [strided(x) for x in _tensors(thick)]),
            )

    def compile(self, f: Callable, *args) -> Graph:
        return Graph(self.mode, LERP | _sums(self.rank), f, *args)


class Graph:
    """A function of trees of tensors, compiled. `run` takes the tensors alone, each once, in the
    order of the trees, and returns those of the result in the same way."""

    made = 0  # in all, for tests

    def __init__(self, mode: FakeTensorMode, table: dict, f: Callable, *args):
        Graph.made += 1
        fakes = _tensors(args)

        def flat(*tensors: Tensor) -> list[Tensor]:
            return _tensors(f(*_replace(args, tensors)))

        with mode, enable_python_dispatcher():
            self.out = f(*args)  # the result, of fake tensors, for the graph after this one
            traced = make_fx(flat, table)(*fakes)
        with (
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            torch._functorch.config.patch(enable_autograd_cache=False),  # it would skip _compile
            mock.patch.object(ir.Pointwise, "make_loader", _each_once),
        ):
            options = OPTIONS | (CPU if fakes[0].device.type == "cpu" else {})
            compile_fx(traced, fakes, inner_compile=self._compile, config_patches=options)

    def _compile(self, *args, **fields) -> Callable:
        self.compiled = compile_fx_inner(*args, **fields)
        return self.compiled

    def run(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.compiled.current_callable(list(tensors))  # autograd's wrappers left out


def _each_once(self, make_loader=ir.Pointwise.make_loader) -> Callable:
    """Inductor writes a value out anew for each of its readers and finds later that they are the
    same, which takes minutes where every unit of a layer reads all units of the one before."""
    load, seen = make_loader(self), self.__dict__.setdefault("seen", [])

    def once(index: Sequence) -> object:
        handler = virtual.get_ops_handler()
        if not seen or seen[0] is not handler or seen[1] != index:
            seen[:] = handler, index, load(index)
        return seen[2]

    return once


def _sums(rank: int) -> dict:
    """Sums and means of tensors of up to a rank, in float64: one number after the other, as loops
    add them, thousands of float32 numbers lose digits."""

    def exact(op: Callable) -> Callable:
        def f(x: Tensor, *args, dtype: torch.dtype | None = None) -> Tensor:
            if x.ndim > rank or dtype is not None:
                return NotImplemented  # as it is
            return op(x, *args, dtype=torch.float64).to(x.dtype)

        return f

    return {op: exact(op) for op in (aten.sum.dim_IntList, aten.mean.dim)}


def _tensors(tree: object) -> list[Tensor]:
    return list({id(x): x for x in tree_leaves(tree) if isinstance(x, Tensor)}.values())


def _replace(tree: object, tensors: Sequence[Tensor]) -> object:
    """The tree with other tensors, given in the order of `_tensors`."""
    now = dict(zip(map(id, _tensors(tree)), tensors, strict=True))
    return tree_map(lambda x: now.get(id(x), x), tree)
