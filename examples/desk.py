"""The net that every example trains, and its training in eager PyTorch.

    python export.py mulo_m && python examples/desk.py

writes exported/desk.json and exported/desk.bin: initial weights and 201 batches of the task
fashion8_mlp_w64_d3 (8x8 Fashion-MNIST; an MLP of 64-64-64-10 in μP), for programs without torch. It
then trains the net for 200 steps with mulo.MuLO and prints the loss on the last batch. The other
examples print the same loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import mulo
from mulo import checkpoints, tasks

TASK, STEPS = "fashion8_mlp_w64_d3", 200


def setup() -> tuple[tasks.Task, torch.nn.Module, list[tuple[Tensor, Tensor]]]:
    """The task, its net and STEPS + 1 batches."""
    generator = torch.Generator().manual_seed(0)
    task = tasks.get(TASK)
    model, data = task.model(generator), task.data()
    return task, model, [data.batch(generator, task.batch_size) for _ in range(STEPS + 1)]


def write(folder: Path) -> None:
    """Write the arrays to desk.bin, and the name, shape and type of each to desk.json."""
    task, model, batches = setup()
    arrays = {name: p.detach().numpy() for name, p in model.named_parameters()}
    arrays["x"] = torch.stack([x.flatten(1) for x, _ in batches]).numpy()
    arrays["y"] = torch.stack([y for _, y in batches]).numpy().astype(np.int32)
    about = {
        "steps": STEPS,
        "multiplier": 1 / task.width,  # of the output layer, under μP
        "roles": task.roles(),
        "arrays": [[k, list(x.shape), str(x.dtype)] for k, x in arrays.items()],
    }
    content = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values())
    checkpoints.write_atomically(folder / "desk.bin", content)
    checkpoints.write_atomically(folder / "desk.json", json.dumps(about, indent=1))


def train(optimizer: Callable[[list[dict]], torch.optim.Optimizer]) -> float:
    """Train for STEPS steps; returns the loss on the last batch."""
    task, model, batches = setup()
    opt = optimizer(mulo.param_groups(model, task.roles()))
    for batch in batches[:STEPS]:
        opt.zero_grad()
        task.loss(model, batch).backward()
        opt.step()
    with torch.no_grad():
        return task.loss(model, batches[STEPS]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the examples' task, and train on it.")
    parser.add_argument("--out", default="exported", help="folder to write to (default: exported)")
    folder = Path(parser.parse_args().out)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    print("loss", train(lambda groups: mulo.MuLO(groups, mulo.load("mulo_m"))))


if __name__ == "__main__":
    main()
