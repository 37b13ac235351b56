"""What tests of exported files share."""

import hashlib
import json

import torch

from mulo import export


def inputs_of(config, kind, **sizes):
    """Random inputs with gradients of size 0.01, and scale = 1 / lam1."""
    generator, x = torch.Generator().manual_seed(0), {}
    factors = {"p": 0.1, "g": 0.01, "M": 0.01, "V": 1e-4, "r": 1e-4, "c": 1e-4}
    for name, shape in export.shapes(config, kind)[0].items():
        v = torch.randn([sizes.get(d, d) for d in shape], generator=generator)
        x[name] = factors.get(name, 1.0) * (v.square() if name in ("V", "r", "c") else v)
    fixed = {"t": 12.0, "scale": 1 / config.lam1, "decay": 0.0}
    return x | {k: torch.full_like(x[k], v) for k, v in fixed.items()}


def error(run, lo, kind, x):
    """Of the update, relative to its largest entry, against the graph in float64."""
    graph = getattr(export.Graphs(lo, kind).double(), kind)
    p, right = x["p"].double(), graph(*(v.double() for v in x.values()))[0]
    return float((run(x)["new_p"].double() - right).abs().max() / (right - p).abs().max())


def sign(folder, file):
    """Make the .json agree with a file that was changed."""
    config = json.loads((folder / "mulo_m.json").read_text())
    config["sha256"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    (folder / "mulo_m.json").write_text(json.dumps(config))
