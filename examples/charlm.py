"""A small GPT over characters, by default on the Python of this repository.

python examples/charlm.py --optimizer mulo
python examples/charlm.py --optimizer adamw --lr 3e-3
python examples/charlm.py --text shakespeare.txt --width 384 --depth 6 --steps 5000
torchrun --nproc-per-node 2 -- examples/charlm.py --out runs/charlm     # rerun to resume
"""

from __future__ import annotations

from pathlib import Path

import loop
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 32  # width of an attention head: wider models have more heads


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scale = 1 / HEAD  # μP: not 1/sqrt
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, depth: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> float:
    parser = loop.parser("A character language model.", width=128, batch=32, steps=500, every=100)
    parser.add_argument("--text", type=Path, help="a UTF-8 file (default: this repository's code)")
    parser.add_argument("--depth", type=int, default=4, help="blocks (default: 4)")
    length = "characters of context (default: 128)"
    parser.add_argument("--length", type=int, default=128, help=length)
    args = parser.parse_args()
    if args.width % HEAD:
        raise ValueError(f"--width must be a multiple of {HEAD}, not {args.width}.")
    files = [args.text] if args.text else sorted(Path(__file__).parents[1].glob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    characters = sorted(set(text))
    index = {c: k for k, c in enumerate(characters)}
    data = torch.tensor([index[c] for c in text])
    if len(data) <= args.length:
        raise ValueError(f"the text has {len(data)} characters: use a --length below that.")
    print(f"{len(data):,} characters, {len(characters)} distinct")

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        start = torch.randint(len(data) - args.length, (args.batch, 1), generator=generator)
        rows = data[start + torch.arange(args.length + 1)]
        return rows[:, :-1], rows[:, 1:]

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x).flatten(0, 1).float(), y.flatten())

    def build(width: int) -> nn.Module:
        return GPT(len(characters), args.length, width, args.depth)

    return loop.run(build, batch, loss_of, args)


if __name__ == "__main__":
    main()
