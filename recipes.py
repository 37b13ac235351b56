"""The recipes of meta-training: every setting of a run, at desk scale and at the paper's.

    r = recipe("mulo_m")                          # at desk scale: minutes on a laptop
    r = recipe("mulo_m", "paper", pairs=4)        # the paper's recipe, with one setting changed
    lo = new_lo(r)                                # the learned optimizer it starts from

`python metatrain.py --help` lists the settings with their defaults.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import torch

import mulo
from mulo import kernels, roles, tasks, training

SCALES = ("desk", "paper")


def flag(default, text: str):
    """A field of Recipe that is also a flag of metatrain.py, with its help text."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All settings of a run. The defaults are the paper's (appendix C) where it has them."""

    name: str = "mulo_m"
    scale: str = "paper"
    seed: int = flag(0, "seed of all random numbers of the run")
    net: str = "small_fc"  # or "velo"
    mup: bool = True
    kind: str = flag("in32_mlp", "kind of the tasks (KINDS in tasks.py)")
    widths: tuple[int, ...] = flag((128, 512, 1024), "widths of the nets, one task for each")
    depth: int = flag(3, "depth of the nets")
    batch_size: int = flag(4096, "examples per inner step")

    hidden_size: int = flag(32, "size of the learned optimizer's MLP (the authors': 32, VeLO: 4)")
    lstm_hidden: int = flag(128, "VeLO: size of the LSTM")
    param_inits: int = flag(64, "VeLO: size of the bank of MLPs")
    eps: str = flag("reference", "how epsilons scale: reference, relative or fan_in")
    eps_rms: float = flag(1e-5, "epsilon in the normalizer of the features")
    anneal: float = flag(0.0, "beyond the unroll, updates shrink as (unroll / t)^X")
    input_base: float = flag(0.0, "input size of the input rule (see README); 0: off")
    lam1: float = flag(
        0.01, "lambda_1, the factor on the update; 0.001 in SP and for VeLO, desk velo_m 0.0001"
    )
    pairs: int = flag(8, "antithetic pairs of perturbations per task")
    micro_batch: int = flag(4, "pairs that advance together: fewer take less memory")
    sigma: float = flag(0.01, "standard deviation of the perturbations")
    unroll: int = flag(1000, "inner steps of the longest unroll")
    shortest: int = flag(100, "inner steps of the shortest unroll; lengths are log-uniform")
    truncation: int = flag(50, "inner steps per outer step")
    steps: int = flag(5000, "outer steps")
    warmup: int = flag(100, "outer steps of linear warm-up of the outer learning rate")
    lr: float = flag(3e-3, "outer learning rate after the warm-up")
    lr_end: float = flag(1e-3, "outer learning rate at the end, reached by a cosine")
    weight_decay: float = flag(1e-4, "weight decay of the outer AdamW")
    # DIVERGES: the reference clips the update.
    clip: float = flag(1.0, "largest norm of the meta-gradient")
    backend: str = flag("auto", f"backend of the optimizer's step: {', '.join(kernels.BACKENDS)}")
    tf32: bool = flag(False, "compute the nets' (not the optimizer's) matrix products in TF32")

    def __post_init__(self):
        positive = "pairs micro_batch sigma unroll shortest truncation steps batch_size lr lr_end"
        for name in (*positive.split(), "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}.")
        if self.shortest > self.unroll:
            raise ValueError(f"shortest={self.shortest} exceeds unroll={self.unroll}: lower it.")
        if self.backend not in kernels.BACKENDS:
            raise ValueError(f"unknown backend {self.backend!r}: use {kernels.CHOICES}.")

    def tasks(self) -> list[tasks.Task]:
        """The tasks of a run, in μP or in standard parametrization (SP)."""
        options = {"rules": roles.ALL if self.mup else (), "batch_size": self.batch_size}
        return [tasks.get(f"{self.kind}_w{w}_d{self.depth}", **options) for w in self.widths]


# At desk scale a larger sigma and unrolls of equal length are more reliable. So are small batches:
# their noise teaches the optimizer to average gradients.
DESK = {
    "scale": "desk", "kind": "fashion8_mlp", "widths": (16, 32, 64), "batch_size": 16,
    "hidden_size": 8, "sigma": 0.05, "unroll": 500, "shortest": 500, "truncation": 25,
    "steps": 800, "warmup": 50, "lr": 3e-3, "lr_end": 3e-4, "micro_batch": 8, "anneal": 0.5,
}  # fmt: skip
SP = {"mup": False, "lam1": 0.001}
# DIVERGES: also in SP, updates are not multiplied by RMS(W) (LOConfig.param_scale_mult), because an
# output layer, which starts at 0, would stay there.
VELO = {"net": "velo", "lam1": 0.001, "hidden_size": 4, "truncation": 20, "steps": 45_000}
DESK_VELO = {  # a bank of 256 as in the authors' VeLO: the MLPs of a small bank are large and noisy
    "lstm_hidden": 16, "param_inits": 256, "sigma": 0.02, "lr": 4e-3, "lr_end": 4e-4, "steps": 500,
    "anneal": 0.0,
}  # fmt: skip
# The epsilons of the reference suppress VeLO's features on wide nets, where gradients are small.
# Long runs at a constant rate: with anneal=0.5 the loss rises at the end, with 1 it falls less.
DESK_MUVELO = {"eps": "relative", "steps": 1000, "anneal": 0.75}
DESK_VELO_SP = {"lam1": 1e-4}  # DIVERGES: with 0.001, SP nets diverge from the start
RECIPES = {"mulo_s": {}, "mulo_m": {}, "muvelo_m": VELO, "lo_s": SP, "lo_m": SP}
RECIPES["velo_m"] = VELO | SP


def recipe(name: str, scale: str = "desk", **changes) -> Recipe:
    """A named recipe, with changes. An `_s` optimizer is meta-trained on the first width only."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}: use one of {', '.join(RECIPES)}.")
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}: use one of {', '.join(SCALES)}.")
    fields = {"name": name} | (DESK if scale == "desk" else {}) | RECIPES[name]
    if scale == "desk" and fields.get("net") == "velo":
        fields |= DESK_VELO | (DESK_MUVELO if fields.get("mup", True) else DESK_VELO_SP)
    if name.endswith("_s"):
        fields["widths"] = fields.get("widths", Recipe.widths)[:1]
    r = Recipe(**(fields | changes))
    if r.mup and "input_base" not in changes:
        groups = training.groups_of(r.tasks()[0]).values()
        fan_in = next((group["fan_in"] for group in groups if group["kind"] == "input"), 0)
        r = dataclasses.replace(r, input_base=float(fan_in))
    return r


def new_lo(r: Recipe, device: str = "cpu") -> mulo.LO:
    """The learned optimizer that a run starts from."""
    names = mulo.LOConfig.__dataclass_fields__
    config = {name: value for name, value in vars(r).items() if name in names}
    config |= {"input_base": r.input_base or None, "by_channels": r.mup}
    config["t_max"] = float(r.unroll) if r.net == "small_fc" or r.anneal else None
    generator = torch.Generator().manual_seed(r.seed)
    return mulo.NETS[r.net](mulo.LOConfig(**config), generator).to(device)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the recipe's name, its scale, and a flag for each `flag` of Recipe."""
    unset = {"default": argparse.SUPPRESS}  # then `settings` has only what was given
    names = f"{', '.join(RECIPES)} (default: mulo_m)"
    parser.add_argument("name", nargs="?", metavar="recipe", help=names, **unset)
    parser.add_argument("--scale", choices=SCALES, help="default: desk", **unset)
    group = parser.add_argument_group("settings of the recipe (in brackets: mulo_m's, desk; paper)")
    desk, paper = (vars(recipe("mulo_m", scale)) for scale in SCALES)
    special = {bool: {"action": "store_true"}, tuple: {"type": int, "nargs": "+", "metavar": "X"}}
    for field in dataclasses.fields(Recipe):
        if field.metadata:
            name, kind = field.name, type(field.default)
            text = f"{field.metadata['help']} ({desk[name]}; {paper[name]})"
            options = unset | special.get(kind, {"type": kind, "metavar": "X"})
            group.add_argument(f"--{name.replace('_', '-')}", help=text, **options)


def settings(args: argparse.Namespace) -> dict:
    """The settings given on the command line, for `recipe`."""
    given = {k: v for k, v in vars(args).items() if k in Recipe.__dataclass_fields__}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
