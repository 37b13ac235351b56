"""The step of sharded parameters: DTensors, as FSDP2 and tensor parallelism create them.

Every process steps its own shard. The step is element-wise except for its means: `replay` runs pure
functions until each needs an unknown mean over all shards (`features.mean_along`, `mean_all`), adds
up the sums of all functions in one all-reduce, and runs them again from the start. The number of
all-reduces does not depend on the number of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mulo import features


def is_dtensor(x: Tensor) -> bool:
    """Whether x is a DTensor. Importing that class is slow, so check whether it was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


class Shards(NamedTuple):
    """How a tensor is sharded."""

    axis: int  # counted from the end
    group: dist.ProcessGroup


class Unknown(Exception):
    """Raised by a mean that has not been reduced yet, with this shard's sums and their count."""


class Means(NamedTuple):
    """What one run of a function uses for means over the shards of its tensor."""

    axis: int  # of Shards
    known: Iterator[Tensor]  # in the order in which the function asks for them

    def mean(self, x: Tensor, axis: int) -> Tensor:
        """The mean along an axis, which stays with size 1, over all shards: also where x is the
        same on every shard."""
        known = next(self.known, None)
        if known is None:
            raise Unknown(x.sum(axis, keepdim=True), x.shape[axis])
        return known


def replay(functions: dict[int, tuple[Callable, Shards | None]]) -> Iterator[tuple[int, Any]]:
    """Yield (key, result) of each function as it completes. Shards is None: not sharded."""
    waiting = {k: (f, shards, []) for k, (f, shards) in functions.items() if shards}
    yield from ((k, f()) for k, (f, shards) in functions.items() if not shards)
    while waiting:
        requests = []
        for k, (f, shards, known) in list(waiting.items()):
            try:
                with features.over_shards(Means(shards.axis, iter(known))):
                    result = f()
            except Unknown as unknown:
                requests.append((shards.group, known, *unknown.args))
                continue
            del waiting[k]
            yield k, result
        _add_means(requests)


def _add_means(requests: list[tuple[dist.ProcessGroup, list[Tensor], Tensor, int]]) -> None:
    """All-reduce the sums and counts, once per process group, and append the means to `known`."""
    for group in dict.fromkeys(group for group, *_ in requests):
        members = [request for request in requests if request[0] is group]
        parts = [torch.cat([x.flatten(), x.new_tensor([n])]) for _, _, x, n in members]
        total = torch.cat(parts)
        dist.all_reduce(total, group=group)
        totals = total.split([len(x) for x in parts])
        for (_, known, x, _), part in zip(members, totals, strict=True):
            known.append((part[:-1] / part[-1]).view(x.shape))


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
