"""A learned optimizer: its configuration and its networks.

    lo = SmallFC(LOConfig(hidden_size=4))

Paper: appendix A.1. `SmallFC` is a small MLP applied to every parameter. `VeLO` has an LSTM over
the tensors of a net, which generates such an MLP for each of them, anew at each step. `rule.py` has
the update rule they are part of. Functions take weights phi with a leading axis: 1 if they are
shared, else one set for each net or tensor.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import torch
from torch import Tensor, nn

Phi = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class LOConfig:
    """Everything about a learned optimizer that is not a weight; stored in its checkpoint."""

    net: str = "small_fc"  # or "velo"
    hidden_size: int = 32  # the authors' configuration; 4 in the paper's text
    hidden_layers: int = 2  # paper, appendix A.1.1
    lam1: float = 0.001  # lambda_1 of eq. 2; 0.01 for the small_fc μLOs (paper, appendix C)
    lam2: float = 0.001  # lambda_2 of eq. 2
    spec: str = "reference"  # or "paper": the paper's literal time features, 29 VeLO features
    eps: str = "reference"  # or "relative" (to a tensor's gradients), "fan_in" (times 1/fan_in)
    eps_rms: float = 1e-5  # of the RMS normaliser; the reference's, 0 in the paper
    t_max: float | None = None  # time features see min(t, t_max): the meta-trained horizon
    anneal: float = 0.0  # beyond t_max updates shrink as (t_max / t)^anneal
    lstm_hidden: int = 128  # VeLO: the reference's class defaults (512 and 256 in released VeLO)
    param_inits: int = 64  # VeLO: size of the bank of per-parameter MLPs
    param_scale_mult: bool = False  # VeLO: multiply the update by RMS(W); off for μVeLO
    use_bugged_loss_features: bool = False  # VeLO: all loss half-lives 10, for old checkpoints

    def __post_init__(self):
        choices = {
            "net": ("small_fc", "velo"),
            "spec": ("reference", "paper"),
            "eps": ("reference", "relative", "fan_in"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown: use one of {allowed}."
                )
        for name in ("hidden_size", "hidden_layers", "lstm_hidden", "param_inits"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer, not {getattr(self, name)!r}.")
        for name in ("lam1", "lam2", "eps_rms", "anneal"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a number of 0 or more, not {value!r}.")
        number = isinstance(self.t_max, int | float) and 0 < self.t_max < math.inf
        if not number and self.t_max is not None:
            raise ValueError(f"t_max must be None or a number above 0, not {self.t_max!r}.")

    @property
    def feature_set(self) -> str:
        """Which feature set: "small_fc", "velo" or "velo_paper"."""
        return "velo_paper" if (self.net, self.spec) == ("velo", "paper") else self.net

    @property
    def num_features(self) -> int:
        return {"small_fc": 39, "velo": 30, "velo_paper": 29}[self.feature_set]

    def layer_sizes(self) -> list[int]:
        return [self.num_features, *[self.hidden_size] * self.hidden_layers, 2]


def _truncated_normal(*shape: int, fan_in: int, generator: torch.Generator | None) -> Tensor:
    """N(0, 1/fan_in) truncated at two standard deviations: the reference's init."""
    return nn.init.trunc_normal_(torch.empty(shape), generator=generator).mul_(fan_in**-0.5)


class LO(nn.Module):
    """Weights phi with their config. Subclasses say which weights there are and how they start."""

    mup = False  # known to be meta-trained under μP

    def __init__(self, config: LOConfig, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        for name, value in self.initial_weights(config, generator).items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def with_config(self, **fields) -> LO:
        """A copy with the same weights under another config."""
        new = type(self)(dataclasses.replace(self.config, **fields))
        new.load_state_dict(self.state_dict())
        new.mup = self.mup
        return new.to(next(self.parameters()).device)

    def __repr__(self):
        return f"{type(self).__name__}({self.config})"


class SmallFC(LO):
    """small_fc_lopt: one MLP for every parameter; its decays are weights too, as offsets."""

    def __init__(self, config: LOConfig | None = None, generator: torch.Generator | None = None):
        super().__init__(dataclasses.replace(config or LOConfig(), net="small_fc"), generator)

    @staticmethod
    def initial_weights(config: LOConfig, generator: torch.Generator | None) -> Phi:
        phi, sizes = {}, config.layer_sizes()
        for k, (n, m) in enumerate(pairwise(sizes)):
            phi[f"w{k}"] = _truncated_normal(n, m, fan_in=n, generator=generator)
            phi[f"b{k}"] = torch.zeros(m)
        decays = {"momentum_decays": 3, "rms_decays": 1, "adafactor_decays": 3}
        return phi | {name: torch.zeros(n) for name, n in decays.items()}

    def forward(self, A: Tensor) -> Tensor:
        """The bare network: features (..., 39) -> [d, m] (..., 2)."""
        return mlp(stacked(self), A[None], self.config.hidden_layers)[0]


class VeLO(LO):
    """An LSTM over tensors that generates, each step, every tensor's own MLP and rate alpha."""

    def __init__(self, config: LOConfig | None = None, generator: torch.Generator | None = None):
        super().__init__(
            dataclasses.replace(config or LOConfig(hidden_size=4), net="velo"), generator
        )

    @staticmethod
    def initial_weights(config: LOConfig, generator: torch.Generator | None) -> Phi:
        H, K = config.lstm_hidden, config.param_inits
        phi = {}
        for name, n, m in (
            ("mix", 30, H),  # linear_1 of the reference: its maximum over tensors is shared by all
            ("embed", 30, H),  # linear_2
            ("lstm", 2 * H, 4 * H),
            ("controls", H, K),
            ("alpha", H, 1),  # step_size
        ):
            phi[f"{name}_w"] = _truncated_normal(n, m, fan_in=n, generator=generator)
            phi[f"{name}_b"] = torch.zeros(m)
        phi |= {"hidden0": torch.zeros(1, H), "cell0": torch.zeros(1, H)}
        sizes = config.layer_sizes()
        for k, (n, m) in enumerate(pairwise(sizes)):
            phi[f"bank_w{k}"] = _truncated_normal(K, n, m, fan_in=n, generator=generator)
            phi[f"bank_b{k}"] = torch.zeros(K, m)
        return phi


def stacked(lo: LO) -> Phi:
    """The weights of one LO with a leading axis of 1, as `step` takes them.

    An LO has weights of its own only, and to walk its modules at every step would take long.
    """
    return {name: w.unsqueeze(0) for name, w in lo._parameters.items()}


def mlp(phi: Phi, x: Tensor, hidden_layers: int) -> Tensor:
    """f_phi(A) = W2 relu(W1 relu(W0 A + b0) + b1) + b2, for x (S, ..., F) -> (S, ..., 2)."""
    shape = x.shape
    x = x.reshape(shape[0], -1, shape[-1])
    for k in range(hidden_layers + 1):
        x = x @ phi[f"w{k}"] + phi[f"b{k}"].unsqueeze(1)
        x = x.relu() if k < hidden_layers else x
    return x.reshape(*shape[:-1], 2)


def lstm_step(
    phi: Phi,  # (P | 1, ...) each
    x: Tensor,  # (P, T, 30): features of the T tensors of P nets
    h: Tensor,  # (P, T, H)
    cell: Tensor,  # (P, T, H)
) -> tuple[Tensor, Tensor]:
    """One step of the LSTM over the tensors of a net, which mix by a maximum: new h and cell."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ phi[f"{name}_w"] + phi[f"{name}_b"].unsqueeze(-2)

    y = linear("embed", x) + linear("mix", x).relu().amax(-2, keepdim=True)
    i, g, f, o = linear("lstm", torch.cat([y, h], -1)).chunk(4, -1)
    cell = torch.sigmoid(f + 1) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def hypernetwork(config: LOConfig, phi: Phi, h: Tensor) -> tuple[Phi, Tensor]:
    """From the LSTM's output h (P, T, H): MLP weights (P, T, ...) and the rate alpha (P, T).

    theta = 100 mean_k(control_k theta_k) over the bank. DIVERGES: alpha is the raw linear output,
    which may be negative; the paper only calls it a learning-rate multiplier.
    """
    control = h @ phi["controls_w"] + phi["controls_b"].unsqueeze(-2)  # (P, T, K)
    control = control * (100 / config.param_inits)
    weights = {}
    for k in range(config.hidden_layers + 1):
        for n in "wb":
            bank = phi[f"bank_{n}{k}"]  # (P | 1, K, ...)
            weights[f"{n}{k}"] = (control @ bank.flatten(2)).unflatten(-1, bank.shape[2:])
    return weights, (h @ phi["alpha_w"] + phi["alpha_b"].unsqueeze(-2)).squeeze(-1)
