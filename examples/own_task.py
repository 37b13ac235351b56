"""A task of your own: a regression, with squared loss. tasks.py says what its parts must be.

python metatrain.py --kind examples/own_task.py
python evaluate.py tune examples/own_task.py
python evaluate.py task examples/own_task.py_w256_d3 --who runs/mulo_m_desk_seed0 mulo_m adamw
"""

import torch
from torch import nn

from mulo import tasks


class Sines:
    """x ~ N(0, 1), and the sine of each coordinate's sum with the next."""

    shape, classes = (8,), None

    def __init__(self, device):
        self.device = device

    def batch(self, generators, size):
        x = torch.stack([torch.randn(size, 8, generator=g) for g in generators]).to(self.device)
        return x, torch.sin(x + x.roll(1, -1))


def build(width, depth):
    hidden = [layer for _ in range(depth - 2) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), *hidden, nn.Linear(width, 8))


def loss(output, target):
    return (output - target).square().mean()


tasks.register("sines", build, Sines, loss, loss_bound=0.75)  # 0.5 is the variance of the targets
