"""The networks of learned optimizers: their configuration, `SmallFC` and `VeLO`.

    lo = SmallFC(LOConfig(hidden_size=32), torch.Generator().manual_seed(0))
    phi = stacked(lo)                  # its weights, as `mulo.step` takes them

Paper: appendix A.1. `SmallFC` is one MLP for all parameters. `VeLO` is an LSTM that sees each
tensor once per step and generates that tensor's MLP (`generate`).

Meta-training runs P copies of a learned optimizer with different weights, each on its own net. So
weights phi are dicts of tensors (P, ...), or (1, ...) if all nets share them. VeLO generates
weights (P, T, ...): one MLP for each of the T tensors of a net.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from mulo import features
from mulo.features import LossBuffer, Phi


@dataclasses.dataclass(frozen=True)
class LOConfig:
    """All settings of a learned optimizer; stored in its checkpoint with its weights."""

    net: str = "small_fc"  # or "velo"
    hidden_size: int = 32  # DIVERGES: the authors' configuration; 4 in the paper's text
    hidden_layers: int = 2  # paper, appendix A.1.1
    lam1: float = 0.001  # lambda_1 of eq. 2; 0.01 for the small_fc μLOs (paper, appendix C)
    lam2: float = 0.001  # lambda_2 of eq. 2
    spec: str = "reference"  # or "paper": the paper's literal time features, 29 VeLO features
    eps: str = "reference"  # or "relative" (to a tensor's gradients), "fan_in" (times 1/fan_in)
    eps_rms: float = 1e-5  # of the RMS normaliser; the reference's, 0 in the paper
    t_max: float | None = None  # the meta-trained horizon; small_fc sees min(t, t_max)
    anneal: float = 0.0  # beyond t_max, updates shrink as (t_max / t)^anneal
    input_base: float | None = None  # input size in meta-training: see roles.size_factor
    by_channels: bool = False  # scale hidden convs by 1/channels: see roles.size_factor
    lstm_hidden: int = 128  # VeLO: size of the LSTM (512 in released VeLO)
    param_inits: int = 64  # VeLO: number of MLPs in the bank (256 in released VeLO)
    param_scale_mult: bool = False  # VeLO: multiply the update by RMS(W); off for μVeLO
    use_bugged_loss_features: bool = False  # VeLO: time constant 10 for all loss means

    def __post_init__(self):
        choices = {"net": ("small_fc", "velo"), "spec": ("reference", "paper")}
        choices["eps"] = ("reference", "relative", "fan_in")
        for name, value in vars(self).items():
            finite = isinstance(value, int | float) and abs(value) < math.inf
            if name in choices and value not in choices[name]:
                raise ValueError(f"{name}={value!r} is unknown: use one of {choices[name]}.")
            if name in ("hidden_size", "hidden_layers", "lstm_hidden", "param_inits"):
                if not (isinstance(value, int) and value > 0):
                    raise ValueError(f"{name} must be a positive integer, not {value!r}.")
            if name in ("lam1", "lam2", "eps_rms", "anneal") and not (finite and value >= 0):
                raise ValueError(f"{name} must be a number of 0 or more, not {value!r}.")
            if name in ("t_max", "input_base") and not (value is None or (finite and value > 0)):
                raise ValueError(f"{name} must be None or a number above 0, not {value!r}.")

    @property
    def feature_set(self) -> str:
        """Which feature set: "small_fc", "velo" or "velo_paper"."""
        return "velo_paper" if (self.net, self.spec) == ("velo", "paper") else self.net

    @property
    def num_features(self) -> int:
        return len(features.feature_names(self.feature_set))

    def layer_sizes(self) -> list[int]:
        return [self.num_features, *[self.hidden_size] * self.hidden_layers, 2]


def _truncated_normal(*shape: int, generator: torch.Generator | None) -> Tensor:
    """N(0, 1/fan_in), fan_in = shape[-2], cut at two standard deviations: the reference's init."""
    return nn.init.trunc_normal_(torch.empty(shape), generator=generator).mul_(shape[-2] ** -0.5)


class LO(nn.Module):
    """Base class: the weights phi of a learned optimizer and its config."""

    default: LOConfig
    about: dict = {}  # noqa: RUF012 (older pickles have none of their own)

    def __init__(self, config: LOConfig | None = None, generator: torch.Generator | None = None):
        super().__init__()
        self.config = dataclasses.replace(config or self.default, net=self.default.net)
        for name, value in self.initial_weights(self.config, generator).items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.about: dict = {}  # plain values that are saved with it: recipe, seed, command, ...

    @property
    def mup(self) -> bool | None:
        """Whether it was meta-trained under μP; None if that is not known."""
        return (self.about.get("recipe") or self.about).get("mup")

    def with_config(self, **fields) -> LO:
        """Return a copy with some fields of the config replaced, but not sizes."""
        new = type(self)(dataclasses.replace(self.config, **fields), torch.Generator())
        if sum(w.numel() for w in new.parameters()) != sum(w.numel() for w in self.parameters()):
            raise ValueError(f"{fields} changes the size of the network: leave the sizes out.")
        new.load_state_dict(self.state_dict())
        new.about = dict(self.about)
        return new.to(next(self.parameters()).device)

    def extra_repr(self) -> str:
        return str(self.config)


class SmallFC(LO):
    """small_fc_lopt: one MLP for every parameter, and learned decays (features.mixing_rate)."""

    default = LOConfig()

    @staticmethod
    def initial_weights(config: LOConfig, generator: torch.Generator | None) -> Phi:
        phi = {}
        for k, (n, m) in enumerate(pairwise(config.layer_sizes())):
            phi[f"w{k}"] = _truncated_normal(n, m, generator=generator)
            phi[f"b{k}"] = torch.zeros(m)
        vectors = {"momentum_decays": 3, "rms_decays": 1, "adafactor_decays": 3}
        return phi | {name: torch.zeros(n) for name, n in vectors.items()}


class VeLO(LO):
    """An LSTM that generates, at each step, an MLP and a learning rate alpha for every tensor."""

    default = LOConfig(net="velo", hidden_size=4)

    @staticmethod
    def initial_weights(config: LOConfig, generator: torch.Generator | None) -> Phi:
        H, K = config.lstm_hidden, config.param_inits
        phi = {}
        for name, n, m in (
            ("mix", 30, H),  # linear_1 of the reference; max-pooled over tensors
            ("embed", 30, H),  # linear_2
            ("lstm", 2 * H, 4 * H),
            ("controls", H, K),
            ("alpha", H, 1),  # step_size
        ):
            phi[f"{name}_w"] = _truncated_normal(n, m, generator=generator)
            phi[f"{name}_b"] = torch.zeros(m)
        phi |= {"hidden0": torch.zeros(1, H), "cell0": torch.zeros(1, H)}
        for k, (n, m) in enumerate(pairwise(config.layer_sizes())):
            phi[f"bank_w{k}"] = _truncated_normal(K, n, m, generator=generator)
            phi[f"bank_b{k}"] = torch.zeros(K, m)
        return phi


NETS = {"small_fc": SmallFC, "velo": VeLO}


def stacked(lo: LO) -> Phi:
    """The weights of an LO with a leading axis of 1, as `step` takes them."""
    return {name: w.unsqueeze(0) for name, w in lo.named_parameters(recurse=False)}


def mlp(phi: Phi, x: Tensor, hidden_layers: int) -> Tensor:
    """f_phi(A) = W2 relu(W1 relu(W0 A + b0) + b1) + b2, for x (S, ..., F) -> (S, ..., 2)."""
    shape = x.shape
    x = x.reshape(shape[0], -1, shape[-1])
    for k in range(hidden_layers + 1):
        x = x @ phi[f"w{k}"] + phi[f"b{k}"].unsqueeze(1)
        x = x.relu() if k < hidden_layers else x
    return x.reshape(*shape[:-1], 2)


def fused(config: LOConfig, phi: Phi) -> Phi:
    """VeLO's weights (P | 1, ...) for `generate`: layers with the same input are one layer.

    The generated weights are packed as kernels.pack does it: rates, then layers. The columns of the
    rates have a constant bias and no weights.
    """
    x, scale = dict(phi), 100 / config.param_inits
    i, g, f, o = x["lstm_b"].chunk(4, -1)
    names = [f"bank_{n}{k}" for k in range(config.hidden_layers + 1) for n in "wb"]
    bank = torch.cat([x[name].flatten(2) for name in names], -1)  # (P | 1, K, N)
    rates = torch.cat(features.fixed_rates(bank.dtype, bank.device), -1)  # (1, 7)
    fused = {"lstm_w": x["lstm_w"], "lstm_b": torch.cat([i, g, f + 1, o], -1)}
    for n in "wb":
        fused[f"inputs_{n}"] = torch.cat([x[f"mix_{n}"], x[f"embed_{n}"]], -1)
        fused[f"outputs_{n}"] = torch.cat([scale * x[f"controls_{n}"], x[f"alpha_{n}"]], -1)
    fused["bank_w"] = nn.functional.pad(bank, (rates.shape[1], 0))
    return fused | {"bank_b": nn.functional.pad(rates, (0, bank.shape[-1]))}


def linear(phi: Phi, name: str, x: Tensor) -> Tensor:
    """x w + b for x (P, T, n) and weights (P | 1, ...)."""
    w, b = phi[f"{name}_w"].expand(len(x), -1, -1), phi[f"{name}_b"].unsqueeze(-2)
    return torch.baddbmm(b, x, w)


def lstm_step(
    phi: Phi,  # from `fused`
    x: Tensor,  # (P, T, 30): per-tensor features
    h: Tensor,  # (P, T, H)
    cell: Tensor,  # (P, T, H)
    share: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One LSTM step for every tensor. Its input includes a max over all tensors of the net; `share`
    extends the max to the tensors of other processes."""
    mix, embed = linear(phi, "inputs", x).chunk(2, -1)
    largest = mix.amax(-2, keepdim=True).relu()  # (P, 1, H)
    y = embed + (share(largest) if share else largest)
    gates = linear(phi, "lstm", torch.cat([y, h], -1))  # (P, T, 4 H)
    (i, _, f, o), (_, g, _, _) = torch.sigmoid(gates).chunk(4, -1), gates.chunk(4, -1)
    cell = torch.addcmul(i * torch.tanh(g), f, cell)  # `fused` has added 1 to f
    return o * torch.tanh(cell), cell


def unpack(config: LOConfig, packed: Tensor) -> Phi:
    """The MLP weights (P, T, ...) in packed ones, as views."""
    shapes = [s for n, m in pairwise(config.layer_sizes()) for s in ((n, m), (m,))]
    names = [f"{n}{k}" for k in range(config.hidden_layers + 1) for n in "wb"]
    sizes = [math.prod(s) for s in shapes]
    parts = packed[..., -sum(sizes) :].split(sizes, -1)
    return {k: x.unflatten(-1, s) for k, x, s in zip(names, parts, shapes, strict=True)}


@features.float32_products()
def generate(
    phi: Phi,  # from `fused`
    memory: LossBuffer,  # of P nets
    loss: Tensor,  # (P,)
    decays: Tensor,  # (10,) or (P, 10), from features.loss_decays
    x_time: Tensor,  # (P, T, 9), from features.fraction_features
    x_tensor: Tensor,  # (P, T, 12), from features.tensor_features
    h: Tensor,  # (P, T, H)
    cell: Tensor,  # (P, T, H)
    share: Callable[[Tensor], Tensor] | None = None,  # see lstm_step
) -> tuple[LossBuffer, Tensor, Tensor, Tensor, Tensor]:
    """VeLO before each step: advance the LSTM and generate the MLPs of T tensors of P nets.

    Returns memory, h, cell, the packed MLP weights (P, T, N) and alpha (P, T), not annealed.
    phi_W = 100 mean_k(control_k bank_k). DIVERGES: alpha is the raw linear output, which may be
    negative; the paper only calls it a learning-rate multiplier.
    """
    memory, x_loss = features.loss_features(memory, loss, decays)
    x_loss = x_loss.unsqueeze(1).expand(-1, h.shape[1], -1)
    x = torch.cat([x_time, x_loss, x_tensor], -1)  # (P, T, 30)
    h, cell = lstm_step(phi, x, h, cell, share)
    outputs = linear(phi, "outputs", h)  # (P, T, K + 1): 100/K times the controls, then alpha
    return memory, h, cell, linear(phi, "bank", outputs[..., :-1]), outputs[..., -1]
