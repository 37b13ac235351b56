"""A training loop to copy: AdamW or μLO by one flag, a schedule, checkpoints, resume, DDP.

`examples/charlm.py` and `examples/resnet.py` bring a model and data; everything else is here. Lines
that are there because of μLO are marked; without them it is an ordinary loop.
"""

from __future__ import annotations

import argparse
import contextlib
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


@contextlib.contextmanager
def one_sentence():
    """A file that is missing, or a flag that does not fit, is said without a traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def parser(description: str, **defaults) -> argparse.ArgumentParser:
    """The flags that both examples share."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--optimizer", choices=["mulo", "adamw"], default="mulo")
    p.add_argument("--lo", default="mulo_m", help="the μLO: a shipped name or a file (mulo_m)")
    p.add_argument("--lr", type=float, help="default: 1 for a μLO, 0.001 for AdamW")
    p.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    p.add_argument("--width", type=positive)
    p.add_argument("--batch", type=positive)
    p.add_argument("--steps", type=positive)
    p.add_argument("--every", type=positive, help="steps between checkpoints")
    p.add_argument("--out", type=Path, help="folder of checkpoints; a run there is continued")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=0)
    p.set_defaults(**defaults)
    return p


def make(build: Callable[[int], nn.Module], args) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    torch.manual_seed(args.seed)  # alike in all processes
    if args.optimizer == "adamw":
        model = build(args.width).to(args.device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3 if args.lr is None else args.lr)
    roles = mulo.infer_roles(build, args.width)  # μLO: which parameters are input, hidden, output
    model = mulo.init_(build(args.width).to(args.device), roles)  # μLO: initial weights by role
    groups = mulo.param_groups(model, roles)  # μLO: factors on the updates
    once = {} if args.schedule == "constant" else {"anneal": 0.0}  # μLO: the schedule anneals
    lo = mulo.load(args.lo, **once)
    return model, mulo.MuLO(groups, lo, lr=1.0 if args.lr is None else args.lr)


def factor(step: int, args) -> float:
    """Of the learning rate: a short warm-up, then a cosine to a tenth, or constant."""
    warmup = min(1.0, (step + 1) / max(1, args.steps // 50))
    if args.schedule == "constant":
        return warmup
    return warmup * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))


def save(path: Path, content: dict) -> None:
    """Written whole, then renamed: a run that is killed keeps its last checkpoint."""
    torch.save(content, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def run(
    build: Callable[[int], nn.Module],
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]],
    loss_of: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor],
    args,
) -> float:
    """Train; the mean loss of the last tenth of the steps, over all processes."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:  # torchrun --nproc-per-node N
        if args.device == "cuda":
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    model, opt = make(build, args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: factor(step, args))
    generator = torch.Generator().manual_seed(1000 * args.seed + rank)  # own batches
    start, losses, path = 0, [], args.out and args.out / f"checkpoint.rank{rank}.pt"
    if path and path.exists():
        saved = torch.load(path, map_location=args.device, weights_only=True)
        try:
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["optimizer"])
        except (RuntimeError, ValueError) as error:
            what = "is of another model or optimizer: choose another --out."
            raise ValueError(f"{path} {what}") from error
        scheduler.load_state_dict(saved["scheduler"])
        generator.set_state(saved["generator"].cpu())
        start, losses = saved["step"], saved["losses"]
        print(f"continuing at step {start}")
    net = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    half = contextlib.nullcontext()
    if args.device.startswith("cuda"):
        half = torch.autocast("cuda", torch.bfloat16)
    clock = time.monotonic()
    for step in range(start, args.steps):
        x, y = batch(generator)
        with half:
            loss = loss_of(net, x.to(args.device), y.to(args.device))
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if rank == 0 and step % max(1, args.steps // 20) == 0:
            speed = (step + 1 - start) / (time.monotonic() - clock)
            print(f"step {step}: loss {losses[-1]:.4f}, {speed:.1f} steps/s", flush=True)
        if path and ((step + 1) % args.every == 0 or step + 1 == args.steps):
            args.out.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": opt.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "generator": generator.get_state()}
            save(path, state | {"step": step + 1, "losses": losses})
    end = torch.tensor(losses[-max(1, args.steps // 10) :]).mean().to(args.device)
    if world > 1:
        dist.all_reduce(end)
        dist.destroy_process_group()
    if rank == 0:
        print(f"{args.optimizer}: final loss {end.item() / world:.4f}")
    return end.item() / world
