"""Reading the golden vectors, and running them through the Optimizer. See golden/README.md."""

from pathlib import Path

import numpy as np
import torch

import mulo

GOLDEN = Path(__file__).parent / "golden"
SMALL_FC = sorted(f.stem for f in GOLDEN.glob("small_fc_*.npz"))
VELO = sorted(f.stem for f in GOLDEN.glob("velo_*.npz"))


class Golden:
    def __init__(self, name: str):
        self.name = name
        with np.load(GOLDEN / f"{name}.npz") as z:
            self.z = {k: z[k] for k in z.files}
        self.names = sorted(k.split("/")[1] for k in self.z if k.startswith("param_init/"))
        self.steps = len(self.z[f"grad/{self.names[0]}"])
        self.num_steps = int(self.z["cfg/num_steps"]) if "cfg/num_steps" in self.z else None

    def __getitem__(self, key: str) -> np.ndarray:
        return self.z[key]

    def lo(self) -> mulo.LO:
        arrays = {k.removeprefix("meta/"): v for k, v in self.z.items() if k.startswith("meta/")}
        config = {"lam1": float(self["cfg/step_mult"]), "lam2": float(self["cfg/exp_mult"])}
        for name in ("param_scale_mult", "use_bugged_loss_features"):
            if f"cfg/{name}" in self.z:
                config[name] = bool(self[f"cfg/{name}"])
        return mulo.from_reference(arrays, **config)


def to_torch_layout(x: np.ndarray) -> np.ndarray:
    """JAX's (..., in, out) to torch's (out, in, ...): reversed; kernel axes keep their order."""
    n = x.ndim
    order = [n - 1, n - 2, *range(n - 2)] if n >= 2 else range(n)
    return np.ascontiguousarray(x.transpose(order))


def run(golden: Golden, layout: str, backend: str = "auto"):
    """Yield (step, {name: parameter}, optimizer) after each step; layout is "jax" or "torch"."""
    turn = to_torch_layout if layout == "torch" else np.asarray
    start = {n: torch.tensor(turn(golden[f"param_init/{n}"])) for n in golden.names}
    params = {n: torch.nn.Parameter(x) for n, x in start.items()}
    same = {"step": int(golden["cfg/start_iteration"]), "out_axis": 0 if layout == "torch" else -1}
    scales = {n: float(golden.z.get(f"mup_lr/{n}", 1.0)) for n in params}
    groups = [{"params": [p], "scale": scales[n], **same} for n, p in params.items()]
    opt = mulo.MuLO(groups, golden.lo(), num_steps=golden.num_steps, backend=backend)
    for s in range(golden.steps):
        for n, p in params.items():
            p.grad = torch.tensor(turn(golden[f"grad/{n}"][s]))
        opt.step(loss=torch.tensor(golden["loss"][s]) if "loss" in golden.z else None)
        yield s, params, opt
