"""Muon with a learned rate for each matrix: a study in meta-learning, small enough to hack.

    python examples/learned_rates.py compare                 # the validation table, from RATES_FILE
    python examples/learned_rates.py transfer                # tasks of `paper.py transfer`
    python examples/learned_rates.py train --seed 0          # meta-train: half an hour of one core
    python examples/learned_rates.py compare runs/rates0.json

    opt = LearnedMuon(mulo.param_groups(model, roles, rules=()), steps=500)
    ...; loss.backward(); opt.step(loss); opt.zero_grad()

The rule is linear. A matrix moves by rate * exp(w . features), clipped to exp(-3)..exp(3), times
its orthogonalised momentum; the features are scalars that do not depend on width. w = 0 is Muon
(training.Muon). Biases, norms and embeddings move by Adam with a learned rate of their own.

Meta-training is evolution strategies over whole unrolls: antithetic pairs share initial weights
and batches, and minimise the log of the final loss on tasks that differ in data, depth, width,
batch size and length, at 0.4 to 2.5 times Muon's rate in half of the unrolls. The c10s and text
tasks need $MULO_DATA/cifar10 and $MULO_DATA/input.txt. VALIDATION has no task of paper.py and none
of meta-training, but their data sets overlap; meta-training sees no CIFAR-10, conv net or ViT.
"""

from __future__ import annotations

import argparse
import copy
import csv
import hashlib
import json
import math
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from mulo import evaluate, paper, tasks, training
from mulo.checkpoints import write_atomically
from mulo.evaluate import Job, Results
from mulo.features import trailing
from mulo.optimizees import datasets

RATES_FILE, LOSSES_FILE = (Path(__file__).with_suffix(suffix) for suffix in (".json", ".csv"))
CHOSEN = "seed 2"  # the best on VALIDATION
BASELINES = {
    "muon": "warmup",
    "muon_oracle": "warmup",
    "adamw_oracle": "cosine",
    "mulo_m": "cosine2",
}
MATRIX = ("1", "x", "x^2", "start", "signal", "agreement", "turn", "radial", "size", "rank", "loss")
MATRIX += ("fall", "length", "layers", "input", "output", "x input", "x output", "x signal")
MATRIX += ("x agreement", "signal input", "signal output")  # features of a matrix
VECTOR = ("1", "x", "signal", "loss", "length")  # features of the rate of all vectors
DIM = len(MATRIX) + len(VECTOR)

TEACHERS = {  # of meta-training only
    "ma": {"dim": 32, "classes": 3, "seed": 101},
    "mb": {"dim": 48, "classes": 20, "seed": 102, "alpha": 0.7},
    "mc": {"dim": 128, "classes": 50, "seed": 103},
    "md": {"dim": 96, "classes": 2, "seed": 104},
    "me": {"dim": 64, "classes": 10, "seed": 105, "alpha": 1.0},
    "mf": {"dim": 24, "classes": 6, "seed": 106},
}
datasets.TEACHERS |= TEACHERS
for name, x in TEACHERS.items():
    task = tasks.Task("mlp", f"teacher{name}", (x["dim"],), x["classes"], 64)
    tasks.KINDS[f"teacher{name}_mlp"] = task
VALIDATION = (
    "fashion14_mlp_w256_d3_b64", "teacherv_mlp_w128_d4_b64", "c10s_mlp_w128_d4_b32",
    "teacherv_mlp_w32_d2_b16", "fashion8_mlp_w64_d5_b128", "c10s_mlp_w24_d2_b128",
    "fashion_conv_w32_d3_b32", "text_lm_w48_d2_b8", "fashion_vit_w32_d2_b16",
    "pixels_lm_w32_d2_b8",
)  # fmt: skip
MUON_RATES = (0.006, 0.012, 0.024, 0.048, 0.096)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of P stacked tensors, (P,)."""
    return torch.linalg.vecdot(a.flatten(1), b.flatten(1))


def share_of_rank(d: Tensor) -> Tensor:
    """Effective rank |d|^4 / |d d'|^2 of matrices (P, m, n), as a share of min(m, n)."""
    x = d if d.shape[1] <= d.shape[2] else d.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-8)
    return 1 / ((x @ x.mT).square().sum((1, 2)) + 1e-12) / x.shape[1]


class LearnedRates(training.Muon):
    """Muon for P nets, with weights w (P, DIM) of the rule, for runs of `steps` steps."""

    def __init__(self, task: tasks.Task, lr: Tensor, w: Tensor, steps: int):
        super().__init__(task, lr=lr, b1=evaluate.MUON["b1"], b2=evaluate.MUON["b2"])
        self.w, self.steps = w.split([len(MATRIX), len(VECTOR)], 1), steps

    def init(self, theta: training.Theta) -> training.State:
        state, P = super().init(theta), len(self.rates)
        self.matrices = [name for name in theta if name not in self.vectors]
        # Of each matrix: mean g^2, mean cosine of g with the previous update, and that update
        self.rates, zero = self.rates.to(self.w[0].device), self.w[0].new_zeros(P)
        self.memory = {k: [zero.clone(), zero.clone(), None] for k in self.matrices}
        self.signal = zero  # mean over matrices, of the previous step
        return state

    def factor(self, features: list[Tensor | float], w: Tensor) -> Tensor:
        """exp(w . features), (P,)."""
        columns = [torch.as_tensor(x, device=w.device).expand(len(w)) for x in features]
        return (torch.stack(columns, 1).nan_to_num(0) * w).sum(1).clamp(-3, 3).exp()

    def losses(self, losses: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Two features: log of the loss relative to the first, and how fast it falls."""
        log = losses.nan_to_num(10.0).clamp(1e-4, 20).log()
        if t == 0:
            self.first, self.fast, self.slow = log.clone(), log.clone(), log.clone()
        n = max(0.02 * self.steps, 5.0)
        self.fast += (log - self.fast) / min(t + 1, n)
        self.slow += (log - self.slow) / min(t + 1, 4 * n)
        fall = (self.slow - self.fast) * 10
        return ((self.fast - self.first) / 1.5 + 0.5).clamp(-3, 3), fall.clamp(-2, 2)

    def learned_step(self, state, theta, grads, losses: Tensor, t: int) -> None:
        """One step of every net, in place; losses (P,) before it."""
        lr, x = training.warmup_cosine(t, self.steps), 2 * t / self.steps - 1
        loss, fall = self.losses(losses, t)
        run = [loss, fall, math.log(self.steps / 300) / 1.2, math.log(len(self.matrices) / 3.5)]
        vector = [1.0, x, self.signal, loss, run[2]]
        self.numbers[0] = self.VECTOR_LR * self.factor(vector, self.w[1])
        vectors = {k: theta[k] for k in self.vectors}
        training.Adam.step(self, state, vectors, grads, t, lr)
        signals = []
        for name in self.matrices:
            p, g, (m, _) = theta[name], grads[name], state[name]
            m.lerp_(g, 1 - self.MOMENTUM)
            d = g.lerp(m, self.MOMENTUM).flatten(2)  # (P, fan_out, fan_in)
            update = training.orthogonalise(d)
            features = self.of_matrix(name, p, g, m, d, update, t)
            signal, agreement = features[:2]
            signals.append(signal)
            role = self.groups[name]["role"]
            i, o = float(role == "input"), float(role == "output")
            time_features = [1.0, x, 1.5 * x * x - 0.5, math.exp(-20 * t / self.steps)]
            products = [x * i, x * o, signal * x, agreement * x, signal * i, signal * o]
            z = self.factor([*time_features, *features, *run, i, o, *products], self.w[0])
            rate = lr * self.rates * z * (d.shape[1] / d.shape[2]) ** 0.5
            p.sub_((trailing(rate, 3) * update).view_as(p))
        self.signal = torch.stack(signals).mean(0).nan_to_num(0)

    def of_matrix(self, name, p, g, m, d, update, t: int) -> list[Tensor]:
        """Six features of a matrix, (P,) each: signal, agreement, turn, radial, size, rank."""
        memory, correction = self.memory[name], 1 - self.MOMENTUM ** (t + 1)
        v, cosine, last = memory
        gg, length, size = dot(g, g), dot(update, update).sqrt() + 1e-12, dot(p, p).sqrt() + 1e-12
        v.lerp_(gg, 1 - self.MOMENTUM)
        signal = (dot(m, m) / correction**2 / (v / correction + 1e-20) + 1e-4).log()  # noise: -3.7
        turn = torch.full_like(v, 0.05)
        if last is not None:
            length_before = dot(last, last).sqrt() + 1e-12
            cosine.lerp_(dot(g, last) / (gg.sqrt() * length_before + 1e-20), 0.1)
            turn = 1 - dot(update, last) / (length * length_before)
        memory[2] = update
        fan_out, fan_in = d.shape[1:]
        relative = size * (fan_in / fan_out / min(fan_out, fan_in)) ** 0.5
        return [
            ((signal + 4) / 1.5).clamp(-2, 2.7),
            (cosine * 6).clamp(-2, 2),
            (turn.clamp_min(1e-3).log() / 1.5 + 0.9).clamp(-2, 2),
            (-dot(update, p) / (length * size) * 5).clamp(-2, 2),
            ((relative + 0.03).log() / 1.5).clamp(-2, 2),
            (share_of_rank(d).log() / 1.5 + 1.7).clamp(-2, 2),
        ]


class LearnedMuon(torch.optim.Optimizer):
    """Learned rates for one model in standard parametrization, for a run of `steps` steps. It has
    its own schedule. `groups`: mulo.param_groups(model, roles, rules=()). Every parameter that is
    not frozen must have a gradient."""

    def __init__(self, groups: list[dict], steps: int, name: str = CHOSEN):
        super().__init__(groups, {})
        self.params, options = {}, {}
        for group in self.param_groups:
            key = group["names"][0]
            if group["kind"] != "table" and group["out_axis"] != 0:
                raise ValueError(f"{key!r} is (in, out): LearnedMuon takes (out, in).")
            if group["scale"] != 1:
                raise ValueError(f"{key!r} is in μP: pass rules=() to init_ and param_groups.")
            for key, p in zip(group["names"], group["params"], strict=True):
                if p.requires_grad:
                    self.params[key], options[key] = p, group
        w = torch.tensor([json.loads(RATES_FILE.read_text())[name]["w"]])
        w = w.to(next(iter(self.params.values())).device)
        self.rule = LearnedRates(options, torch.tensor([training.Muon.LR]), w, steps)
        self.memory, self.t = self.rule.init(self.theta()), 0

    def theta(self) -> training.Theta:
        return {name: p.detach()[None] for name, p in self.params.items()}

    @torch.no_grad()
    def step(self, loss: Tensor | float) -> None:
        loss = torch.as_tensor(loss, dtype=torch.float32).detach().view(1)
        grads = {name: p.grad[None] for name, p in self.params.items()}
        self.rule.learned_step(self.memory, self.theta(), grads, loss, self.t)
        self.t += 1

    def state_dict(self) -> dict:
        """As torch's, with a copy of all that the rule remembers between steps."""
        rule = {k: vars(self.rule).get(k) for k in ("memory", "signal", "first", "fast", "slow")}
        more = {"t": self.t, "moments": self.memory, "rule": rule}
        return super().state_dict() | copy.deepcopy(more)

    def load_state_dict(self, state_dict: dict) -> None:
        state = copy.deepcopy(state_dict)
        saved = {k: m.shape for k, (m, _) in state.get("moments", {}).items()}
        if saved != {k: m.shape for k, (m, _) in self.memory.items()}:
            raise ValueError("this is not a state_dict of LearnedMuon for these parameters.")
        self.t, self.memory = state.pop("t"), state.pop("moments")
        vars(self.rule).update(state.pop("rule"))
        super().load_state_dict(state)


@torch.no_grad()
def log_final_loss(
    name: str,
    steps: int,
    seeds: list[int],
    w: Tensor,  # (copies * seeds, DIM)
    lr: float = training.Muon.LR,
) -> Tensor:
    """Train nets; returns log final losses (copies * seeds,). Copies of a seed share init, data."""
    task, copies = tasks.get(name, rules=()), len(w) // len(seeds)
    inits = [task.init(1, torch.Generator().manual_seed(seed)) for seed in seeds]
    generators = [torch.Generator().manual_seed(evaluate.DATA_SEED + seed) for seed in seeds]
    theta = {k: torch.cat([x[k] for x in inits] * copies) for k in inits[0]}
    data, opt = task.data(), LearnedRates(task, torch.full((len(w),), lr), w, steps)
    state, history = opt.init(theta), torch.zeros(steps, len(w))
    for t in range(steps):
        batch = training.batches(data, generators, task.batch_size, copies)
        history[t], grads = training.gradients(task, theta, batch)
        opt.learned_step(state, theta, grads, history[t], t)
    losses = history.nan_to_num(task.loss_bound).clamp_max(task.loss_bound)
    return training.final_loss(losses).clamp_min(1e-3).log()


def random_task(rng: random.Random) -> tuple[str, int, float]:
    """A task of meta-training: its name, its length, and a factor on the rate."""

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    while True:
        steps = int(log_uniform(100, 1000))
        if rng.random() < 0.12:
            width, depth, batch = (rng.choice(x) for x in ([16, 24, 32], [1, 2], [2, 4, 8]))
            name = f"text_lm_w{width}_d{depth}_b{batch}"
            cost = steps * (16 * batch * depth * (2.5e-4 + 6e-6 * width) + 0.004)
        else:
            kinds = ["fashion8", "fashion8", "fashion14", "fashion"]
            kinds += [f"teacher{name}" for name in TEACHERS]
            kind = rng.choice(kinds)
            width, depth = int(log_uniform(8, 128.99)), rng.choice([2, 3, 4, 5])
            batch = int(log_uniform(8, 256))
            name = f"{kind}_mlp_w{width}_d{depth}_b{batch}"
            inputs, classes = math.prod(tasks.get(name).shape), tasks.get(name).classes
            sizes = [inputs, *[width] * (depth - 1), classes]
            flops = 0
            for a, b in pairwise(sizes):
                flops += 30 * min(a, b) ** 2 * max(a, b) + 6 * batch * a * b
            cost = steps * (16 * flops / 3e10 + 0.0009 * depth + 0.0008)
        factor = log_uniform(0.4, 2.5) if rng.random() < 0.5 else 1.0
        if cost < 8 and name not in VALIDATION:  # seconds, roughly
            return name, steps, factor


def train(seed: int, outer_steps: int, path: Path) -> None:
    """Evolution strategies: 4 tasks per outer step, 8 antithetic pairs each (2 seeds of nets)."""
    rng, generator = random.Random(1000 + seed), torch.Generator().manual_seed(seed)
    N, sigma, start = 8, 0.1, time.monotonic()
    w, m, v, total = torch.zeros(DIM), torch.zeros(DIM), torch.zeros(DIM), torch.zeros(DIM)
    averaged = range(outer_steps * 3 // 5, outer_steps)  # the result is the mean over these
    for k in range(outer_steps):
        blocks = [torch.randn(DIM, DIM, generator=generator) for _ in range(-(-4 * N // DIM))]
        eps = torch.cat([torch.linalg.qr(x)[0] * DIM**0.5 for x in blocks])[: 4 * N]
        eps = eps[torch.randperm(4 * N, generator=generator)]  # orthogonal within a block
        deltas = []
        for e in eps.split(N):
            name, steps, factor = random_task(rng)
            seeds = [rng.randrange(10**6, 2 * 10**9) for _ in range(2)]
            both = w + sigma * torch.cat([e, -e])
            losses = log_final_loss(name, steps, seeds, both, training.Muon.LR * factor)
            deltas.append(losses[:N] - losses[N:])
        delta = torch.cat(deltas).clamp(-0.3, 0.3)
        grad = (eps * delta.unsqueeze(1)).mean(0) / (2 * sigma)
        m.lerp_(grad, 0.1)
        v.lerp_(grad.square(), 0.02)
        # Adam with one scale for all weights: those without a signal do not walk at random
        scale = (v / (1 - 0.98 ** (k + 1))).mean().sqrt() + 1e-8
        lr = 0.03 * min(1, (k + 1) / 5) * (1 - 0.9 * k / outer_steps)
        w = w - lr * (m / (1 - 0.9 ** (k + 1))) / scale
        total += w * (k in averaged)
        minutes = (time.monotonic() - start) / 60
        print(f"outer step {k + 1}: |w| = {w.norm():.3f}, {minutes:.1f} minutes", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"outer_steps": outer_steps, "w": (total / len(averaged)).tolist()}
    write_atomically(path, json.dumps({f"seed {seed}": result}))


def compare(path: Path, steps: int, seeds: list[int], names: tuple[str, ...]) -> None:
    """Print mean log final losses of Muon at several rates and of the learned rates in a file."""
    contestants = {f"Muon {lr:g}": (torch.zeros(DIM), lr) for lr in MUON_RATES}
    for name, x in json.loads(path.read_text()).items():
        contestants[name] = torch.tensor(x["w"]), training.Muon.LR
    print(f"{'':28}" + "".join(f"{name:>12}" for name in contestants))
    rows = []
    for name in names:
        row = []
        for w, lr in contestants.values():
            losses = log_final_loss(name, steps, seeds, w.expand(len(seeds), DIM), lr)
            row.append(losses.mean())
        rows.append(torch.stack(row))
        print(f"{name:28}" + "".join(f"{x:12.4f}" for x in row), flush=True)
    table = torch.stack(rows)  # (tasks, contestants)
    muon = table[:, : len(MUON_RATES)]
    best = int(muon.mean(0).argmin())
    against = {f"Muon {training.Muon.LR:g}": muon[:, MUON_RATES.index(training.Muon.LR)]}
    against[f"Muon {MUON_RATES[best]:g}, the best single rate"] = muon[:, best]
    against["Muon at the best rate for each task"] = muon.min(1).values
    for label, baseline in against.items():
        print(f"\nMean log ratio to {label}:")
        for k, name in list(enumerate(contestants))[len(MUON_RATES) :]:
            mean, error = evaluate.mean_stderr(table[:, k] - baseline)
            print(f"  {name}: {mean:+.4f} ± {error:.4f} over tasks")


def saved_losses(task: str, seeds: list[int], w: Tensor) -> Tensor:
    """Log final losses after 500 steps with weights w (DIM,): from LOSSES_FILE, if it has them."""
    digest = hashlib.sha256(str(w.tolist()).encode()).hexdigest()[:8]
    lines = LOSSES_FILE.read_text().splitlines() if LOSSES_FILE.exists() else []
    kept = {tuple(key): float(x) for *key, x in csv.reader(lines[1:])}  # the first has names
    keys = [(digest, task, str(seed)) for seed in seeds]
    if not kept.keys() >= set(keys):
        losses = log_final_loss(task, 500, seeds, w.expand(len(seeds), DIM)).tolist()
        kept |= zip(keys, losses, strict=True)
        table = [(*key, f"{x:.5f}") for key, x in kept.items()]
        evaluate.write_table(LOSSES_FILE, [("rule", "task", "seed", "log_final_loss"), *table])
    return torch.tensor([kept[key] for key in keys])


def transfer(path: Path, name: str, results: Path) -> None:
    """Train nets of paper.py's transfer tasks with learned rates, once; print log ratios of their
    final losses to those of baselines, which `paper.py transfer` has saved."""
    w, saved, ratios = torch.tensor(json.loads(path.read_text())[name]["w"]), Results(results), {}
    for pattern, widths in paper.TRANSFER.items():
        for task in map(pattern.format, widths):
            if paper.trains("muon", task, paper.IN_TRANSFER):
                seeds = list(range(paper.SEEDS))
                losses, row = saved_losses(task, seeds, w), []
                for baseline, schedule in BASELINES.items():
                    job = Job(evaluate.contender(baseline), task, 500, schedule, seeds)
                    ratio = losses.mean() - training.final_loss(saved.losses(job)).log().mean()
                    ratios.setdefault(baseline, []).append(ratio)
                    row.append(f"{baseline} {ratio:+.3f}")
                print(f"{task:28}{losses.mean().exp():8.4f}   {', '.join(row)}", flush=True)
    for baseline, x in ratios.items():
        mean, error = evaluate.mean_stderr(torch.stack(x))
        ahead = sum(ratio < 0 for ratio in x)
        print(f"{baseline}: {mean:+.4f} ± {error:.4f}, ahead on {ahead} of {len(x)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Muon with a learned rate for each matrix.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="meta-train the weights of the rule")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--outer-steps", type=int, default=130)
    command = commands.add_parser("compare", help="train nets of the validation tasks")
    command.add_argument("file", type=Path, nargs="?", default=RATES_FILE)
    command.add_argument("--steps", type=int, default=500)
    command.add_argument("--seeds", type=int, default=4)
    command.add_argument("--tasks", nargs="+", default=VALIDATION)
    command = commands.add_parser("transfer", help="compare on the transfer tasks of paper.py")
    command.add_argument("name", nargs="?", default=CHOSEN)
    command.add_argument("file", type=Path, nargs="?", default=RATES_FILE)
    command.add_argument("--results", type=Path, default=Path("results"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    training.keep_freed_memory()
    if args.command == "train":
        train(args.seed, args.outer_steps, Path("runs") / f"rates{args.seed}.json")
    elif args.command == "transfer":
        transfer(args.file, args.name, args.results)
    else:
        compare(args.file, args.steps, list(range(9001, 9001 + args.seeds)), tuple(args.tasks))


if __name__ == "__main__":
    main()
