"""A training loop to copy: AdamW or μLO (one flag), a schedule, checkpoints, resume, DDP.

`examples/charlm.py` and `examples/resnet.py` add a model and data. Lines specific to μLO are
marked; without them it is an ordinary loop.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import mulo


def parser(description: str, **defaults) -> argparse.ArgumentParser:
    """The flags that both examples share."""
    p = argparse.ArgumentParser(description=description)

    def add(flag: str, text: str, **options) -> None:
        p.add_argument(flag, help=f"{text} (default: %(default)s)", **options)

    add("--optimizer", "optimizer to train with", choices=["mulo", "adamw"], default="mulo")
    add("--lo", "the learned optimizer, a shipped name or a file", default="mulo_m")
    p.add_argument("--lr", type=float, help="learning rate (default: 1 for a μLO, 0.001 for AdamW)")
    schedule = "schedule of the learning rate; at a constant one, a μLO anneals its own updates"
    add("--schedule", schedule, choices=["cosine", "constant"], default="cosine")
    add("--width", "width of the model", type=int)
    add("--batch", "examples per step and process", type=int)
    add("--steps", "length of the run", type=int)
    add("--every", "steps between checkpoints", type=int)
    out = "folder of checkpoints, to resume from too (default: write none)"
    p.add_argument("--out", type=Path, help=out)
    add("--device", "cpu or cuda", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", "seed of initial weights and batches", type=int, default=0)
    p.set_defaults(**defaults)
    return p


def make(build: Callable[[int], nn.Module], args) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(args.seed)  # the same in all processes
    if args.optimizer == "adamw":
        model = build(args.width).to(args.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3 if args.lr is None else args.lr)
    lo = mulo.load(args.lo)
    sp = {"rules": ()} if lo.mup is False else {}  # μLO: for those meta-trained without μP
    roles = mulo.infer_roles(build, args.width)  # μLO: which parameters are input, hidden, output
    model = mulo.init_(build(args.width).to(args.device), roles, **sp)  # μLO: weights by role
    groups = mulo.param_groups(model, roles, **sp)  # μLO: factors on the updates
    lr = 1.0 if args.lr is None else args.lr
    return model, mulo.MuLO(groups, lo, lr, num_steps=args.steps)  # μLO: VeLO needs num_steps


def factor(step: int, steps: int) -> float:
    """The factor on the learning rate: a short warm-up, then a cosine to a tenth."""
    warmup = min(1.0, (step + 1) / max(1, steps // 50))
    return warmup * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def save(path: Path, content: dict) -> None:
    """Write to another name, then rename: a run that is killed keeps its last checkpoint."""
    torch.save(content, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def run(
    build: Callable[[int], nn.Module],
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    args,
) -> float:
    """Train; returns the mean loss of the last tenth of the steps, over all processes."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:  # torchrun --nproc-per-node N
        if args.device == "cuda":
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    model, opt = make(build, args)
    losses, path = [], args.out and args.out / "checkpoint.pt"
    parts, scheduler = {"model": model, "optimizer": opt}, None
    if args.schedule == "cosine":  # μLO: a scheduler disables the built-in annealing
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: factor(step, args.steps))
        parts["scheduler"] = scheduler
    if path and path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        losses = saved["losses"]
        print(f"continuing at step {len(losses)}")
    net = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    half = torch.autocast("cuda", torch.bfloat16, enabled=args.device.startswith("cuda"))
    start, clock, generator = len(losses), time.monotonic(), torch.Generator()
    for step in range(start, args.steps):
        generator.manual_seed(hash((args.seed, step, rank)))  # needs no checkpoint
        x, y = batch(generator)
        with half:
            loss = loss_of(net, x.to(args.device), y.to(args.device))
        loss.backward()
        loss = loss.detach()
        if world > 1:  # the mean over all processes, so that they take the same step
            dist.all_reduce(loss)
            loss /= world
        opt.step(**({"loss": loss} if args.optimizer == "mulo" else {}))  # μLO: VeLO needs it
        opt.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
        if rank == 0 and step % max(1, args.steps // 20) == 0:
            speed = (step + 1 - start) / (time.monotonic() - clock)
            print(f"step {step}: loss {losses[-1]:.4f}, {speed:.1f} steps/s", flush=True)
        if path and rank == 0 and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            args.out.mkdir(parents=True, exist_ok=True)
            state = {name: part.state_dict() for name, part in parts.items()}
            save(path, state | {"losses": losses})
    if world > 1:
        dist.destroy_process_group()
    last = losses[-max(1, args.steps // 10) :]
    final_loss = sum(last) / len(last)
    if rank == 0:
        print(f"{args.optimizer}: final loss {final_loss:.4f}")
    return final_loss
