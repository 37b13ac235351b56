"""A task of your own: a regression with squared loss. tasks.py documents the parts.

python examples/own_task.py                            # meta-train on it; metatrain.py's flags
python examples/own_task.py evaluate tune sines_w64_d3 # tune the baselines; then compare:
python examples/own_task.py evaluate task sines_w256_d3 --optimizers mulo_m adamw
"""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # not needed after pip install
from mulo import evaluate, metatrain, tasks


class Sines:
    """Inputs x ~ N(0, 1); the targets are sin(x_k + x_(k-1))."""

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

if __name__ == "__main__":  # worker processes import this file only to register the task
    if sys.argv[1:2] == ["evaluate"]:
        del sys.argv[1]
        evaluate.main()
    else:
        metatrain.main(kind="sines")
