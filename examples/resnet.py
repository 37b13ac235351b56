"""A ResNet on CIFAR-10 or, if that is missing, on the Fashion-MNIST in this repository.

python examples/resnet.py --optimizer mulo
python examples/resnet.py --optimizer adamw --lr 3e-3
python examples/resnet.py --width 512 --steps 10000 --data-dir data     # data/cifar10 as published
torchrun --nproc-per-node 2 -- examples/resnet.py --out runs/resnet     # rerun to resume
"""

from __future__ import annotations

import loop  # makes this repository's modules importable

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mulo.optimizees import datasets


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm1(self.conv1(x))))
        return F.relu(self.norm2(y) + self.skip(x))


class ResNet(nn.Module):
    """Three stages; the last has `width` channels."""

    def __init__(self, channels: int, width: int, classes: int = 10):
        super().__init__()
        a, b, c = width // 4, width // 2, width
        self.stem = nn.Conv2d(channels, a, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(
            Block(a, a, 1),
            Block(a, a, 1),
            Block(a, b, 2),
            Block(b, b, 1),
            Block(b, c, 2),
            Block(c, c, 1),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def main() -> float:
    parser = loop.parser("An image classifier.", width=64, batch=64, steps=300, every=100)
    where = "where CIFAR-10 is (default: $MULO_DATA, else ./data; if missing, Fashion-MNIST)"
    parser.add_argument("--data-dir", help=where)
    args = parser.parse_args()
    if args.width % 32:
        raise ValueError(f"--width must be a multiple of 32, not {args.width}.")
    try:
        images = datasets.load("cifar10", data_dir=args.data_dir)
    except FileNotFoundError:
        if args.data_dir is not None:
            raise
        images = datasets.load("fashion10k", size=14)
        print("no CIFAR-10 in ./data or $MULO_DATA: 14x14 Fashion-MNIST instead")

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return images.batch(generator, args.batch)

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x).float(), y)

    return loop.run(lambda width: ResNet(images.shape[0], width), batch, loss_of, args)


if __name__ == "__main__":
    main()
