"""The step of sharded parameters: DTensors, as FSDP2 and tensor parallelism create them.

Every process steps its own shard. The step is element-wise except for its means: `replay` runs pure
functions until each needs an unknown mean over all shards (`features.mean_along`, `mean_all`), adds
up the sums of all functions in one all-reduce, and runs them again from the start. The number of
all-reduces does not depend on the number of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mulo import features

T = TypeVar("T")


def is_dtensor(x: Tensor) -> bool:
    """Whether x is a DTensor. Importing that class is slow, so check whether it was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


class Unknown(Exception):
    """Raised when a function needs a mean over shards that has not been reduced yet."""


class Shards(NamedTuple):
    """How a tensor is sharded."""

    axis: int  # counted from the end
    group: dist.ProcessGroup


class Means:
    """Means over the shards of one tensor, in the order in which the step asks for them."""

    def __init__(self, shards: Shards):
        self.axis, self.group = shards
        self.known: list[Tensor] = []
        self.asked = 0

    def mean(self, x: Tensor, axis: int) -> Tensor:
        """The mean along an axis, which stays with size 1, over all shards: also where x is the
        same on every shard."""
        self.asked += 1
        if self.asked > len(self.known):
            self.sums = x.sum(axis, keepdim=True)
            self.count = x.shape[axis]
            raise Unknown
        return self.known[self.asked - 1]


def replay(functions: dict[int, tuple[Callable[[], T], Shards | None]]) -> Iterator[tuple[int, T]]:
    """Yield (key, result) of each function as it completes. Shards is None: not sharded."""
    waiting = {k: (f, Means(shards)) for k, (f, shards) in functions.items() if shards}
    yield from ((k, f()) for k, (f, shards) in functions.items() if not shards)
    while waiting:
        for k, (f, means) in list(waiting.items()):
            means.asked = 0
            try:
                with features.over_shards(means):
                    result = f()
            except Unknown:
                continue
            del waiting[k]
            yield k, result
        _add([means for _, means in waiting.values()])


def _add(waiting: list[Means]) -> None:
    """All-reduce the requested sums, once per process group, and append the means to `known`."""
    for group in dict.fromkeys(m.group for m in waiting):
        members = [m for m in waiting if m.group is group]
        parts = [torch.cat([m.sums.flatten(), m.sums.new_tensor([m.count])]) for m in members]
        total = torch.cat(parts)
        dist.all_reduce(total, group=group)
        for m, part in zip(members, total.split([len(x) for x in parts]), strict=True):
            m.known.append((part[:-1] / part[-1]).view(m.sums.shape))


def all_reduce(x: Tensor, op: dist.ReduceOp) -> Tensor:
    """x, reduced over all processes."""
    x = x.clone()
    dist.all_reduce(x, op)
    return x


def shards_of(p: Tensor, name: str) -> Shards | None:
    """How a parameter is sharded; None unless it is a sharded DTensor."""
    if not is_dtensor(p):
        return None
    shards = [k for k, x in enumerate(p.placements) if x.is_shard()]
    if len(shards) > 1 or any(type(x).__name__ not in ("Shard", "Replicate") for x in p.placements):
        raise ValueError(
            f"parameter {name} is placed as {p.placements}: MuLO takes parameters that are sharded "
            "along one axis of the device mesh, and replicated along the others."
        )
    if not shards:
        return None
    axis = p.placements[shards[0]].dim % p.ndim
    return Shards(axis - p.ndim, p.device_mesh.get_group(shards[0]))


def any_nonzero(x: Tensor) -> bool:
    """Whether any entry of a tensor, on any process, is not 0."""
    count = x.count_nonzero()
    return bool(count.full_tensor() if is_dtensor(count) else count)


def local(x: Tensor) -> Tensor:
    """The part of a tensor that this process has."""
    return x.to_local() if is_dtensor(x) else x


def local_grad(p: Tensor) -> Tensor:
    """The gradient of this process's part of a parameter."""
    g = p.grad
    return g.redistribute(placements=p.placements).to_local() if is_dtensor(g) else g


def zeros(p: Tensor, shape: tuple[int, ...], averaged: int | None) -> Tensor:
    """Float32 zeros for the state of p; if p is a DTensor, sharded as p is.

    The last axes of `shape` are those of p; the averaged one, counted from the end, is not sharded.
    """
    if not is_dtensor(p):
        return torch.zeros(shape, dtype=torch.float32, device=p.device)
    tensor, placements = sys.modules["torch.distributed.tensor"], []
    for place in p.placements:
        axis = place.dim % p.ndim - p.ndim if place.is_shard() else averaged
        split = axis != averaged
        placements.append(tensor.Shard(axis + len(shape)) if split else tensor.Replicate())
    options = {"device_mesh": p.device_mesh, "placements": placements}
    return tensor.zeros(shape, dtype=torch.float32, **options)
