"""Param groups of MuLO: what is refused, what warns, and when updates anneal."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from numbers import Real

import torch
from torch import Tensor

from mulo import roles


def warn(message: str) -> None:
    """Warn at the user's line: the last one outside of this folder's files and of torch."""
    ours, level, frame = os.path.dirname(__file__), 1, sys._getframe()
    torchs = os.path.dirname(torch.__file__)
    while (file := frame.f_code.co_filename) and frame.f_back:
        if os.path.dirname(file) != ours and not file.startswith(torchs):
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


warn_once = cache(warn)


def doubts(group: dict, mup: bool | None, defaults: dict) -> Iterator[str]:
    """Say what looks wrong in a group. mup: whether lo was meta-trained under μP, if known."""
    before = "this learned optimizer was meta-trained"
    if mup and "scale" not in group:
        fix = "use mulo.init_ and mulo.param_groups(model, roles)"
        yield f"{before} under μP, and parameters without roles do not train if wide: {fix}."
    if mup is False and group.get("scale", 1) != 1:
        fix = "pass rules=() to mulo.param_groups and mulo.init_"
        yield f"{before} without μP, and these parameters are scaled by it: {fix}."
    lr, decay = (float((defaults | group)[key]) for key in ("lr", "weight_decay"))
    if 0 < lr < 0.01:
        yield f"lr={lr:g} is a factor on updates that are of the right size with lr=1: omit it."
    if lr * decay >= 0.01:
        size = f"shrinks parameters by lr * weight_decay = {lr * decay:.2g} in every step"
        yield f"weight_decay={decay:g} {size}: use the product of AdamW's lr and weight_decay."


def check_group(group: dict) -> None:
    """Raise unless a param group has options in their ranges and whole, real parameters."""
    for name, least in {"lr": 0, "weight_decay": 0, "scale": 0, "step": 0, "fan_in": 1}.items():
        value = group[name]
        if not (isinstance(value, Real | Tensor) and value >= least):
            raise ValueError(f"{name} must be a number of {least} or more, not {value!r}.")
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(f"parameters must be real floating point, not {p.dtype}.")
        check_shape(p, group)
    if group["out_axis"] not in (0, 1, -1):
        raise ValueError(f"out_axis must be 0, 1 or -1, not {group['out_axis']!r}.")
    if not isinstance(group["freeze_zero_grad"], bool):
        raise ValueError("freeze_zero_grad must be True or False.")


def check_shape(p: Tensor, group: dict) -> None:
    """Raise if `param_groups` saw no such shape. ZeRO reorders params, so not by position."""
    shape = tuple(p.shape)
    if shape not in map(tuple, group.get("shapes", [shape])):  # loaded shapes may be lists
        fix = "FSDP1 flattens parameters, so use fully_shard (FSDP2)"
        name = roles.name_of(p, group)
        raise ValueError(f"parameter {name} has shape {shape} and is no longer whole: {fix}.")


def annealed_to(group: dict) -> int:
    """The time up to which updates are annealed: t, or that of the last step that annealed."""
    driven = "initial_lr" in group or group["lr"] != 1  # torch's schedulers set initial_lr
    return group.get("annealed_to", 0) if driven else group["step"]


if __name__ == "__main__":
    raise SystemExit("groups.py is a module, not a command: use `import mulo`.")
