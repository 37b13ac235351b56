"""Small models as a user would write them, plain torch, and how MuLO trains them."""

import torch
from torch import nn

import mulo
from mulo import LOConfig


class MLP(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(
            nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 5),
        )  # fmt: skip


class ConvNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 5)

    def forward(self, x):  # (b, 1, 6, 6)
        x = self.norm(self.stem(x)).relu()
        return self.head(self.body(x).relu().mean((2, 3)))


class Attention(nn.Module):
    """Causal self-attention of 4 heads, with the 1/d_head of μP: queries and keys are aligned."""

    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        y = attend(q, k, v, is_causal=True, scale=1 / q.shape[-1])
        return self.proj(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 8, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 11)

    def forward(self, x):  # (b, 8)
        x = self.tokens(x) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.down(self.up(self.norm2(x)).relu())
        return self.head(self.norm3(x))


class TiedMLP(nn.Module):
    """A residual MLP on tokens; its embedding and readout share their weight, as in GPT-2."""

    def __init__(self, width: int):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, width), nn.LayerNorm(width)
        self.body, self.head = nn.Linear(width, width), nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):  # (b,)
        x = self.tokens(x)
        return self.head(self.norm(x + self.body(x).relu()))


class Holder(nn.Module):
    """A module of these parts, without a forward."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def task(model_class: type[nn.Module], batch: int = 64, seed: int = 0):
    """Inputs and labels that fit the model: (x, y)."""
    gen = torch.Generator().manual_seed(seed)
    if model_class is TiedMLP:
        return torch.arange(11), (3 * torch.arange(11) + 1) % 11
    if model_class is Transformer:
        x = torch.randint(11, (batch, 8), generator=gen)
        return x, (x + x.roll(1, 1)) % 11
    shape = (batch, 12) if model_class is MLP else (batch, 1, 6, 6)
    return torch.randn(shape, generator=gen), torch.randint(5, (batch,), generator=gen)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def small(lam1=0.01):
    """An untrained small_fc_lopt."""
    return mulo.SmallFC(LOConfig(hidden_size=4, lam1=lam1))


def velo():
    torch.manual_seed(5)
    return mulo.VeLO(LOConfig(net="velo", hidden_size=4, lstm_hidden=8, param_inits=4))


def make(lo=None, width=16, seed=0, **kwargs):
    """An MLP under μP and its optimizer."""
    torch.manual_seed(seed)
    lo, roles = lo or small(), mulo.infer_roles(MLP, width)
    net = mulo.init_(MLP(width), roles)
    return net, mulo.MuLO(mulo.param_groups(net, roles), lo, **kwargs)


def train(net, opt, steps, x, y, with_loss=False):
    """Train on one batch; return the loss after it."""
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        opt.step(loss=loss) if with_loss else opt.step()
    return loss_of(net, x, y).item()


def values(net):
    return torch.cat([p.detach().float().flatten() for p in net.parameters()])
