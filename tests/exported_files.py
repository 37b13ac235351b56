"""What tests of exported files share."""

import copy
import hashlib
import json

import torch

import export


def inputs_of(graph, generator=None, **sizes):
    """Random inputs with gradients of size 0.01, and lr_scale = 1 / lam1."""
    x = {}
    for name, shape in graph.inputs.items():
        x[name] = torch.randn([sizes.get(d, d) for d in shape], generator=generator)
        if name in ("grad", "momentum"):
            x[name] *= 0.01
        if name in ("second_moment", "row", "col"):
            x[name] = (0.01 * x[name]).square()
    x["step"] = torch.tensor(12.0)
    x["lr_scale"] = torch.full_like(x["lr_scale"], 1 / graph.config.lam1)
    x["param"] *= 0.1
    return x


def error(session, graph, x):
    """Of the update, relative to its largest entry, against the eager step in float64."""
    given = session.run(x)["new_param"].double()
    right, *_ = copy.deepcopy(graph).double()(*(v.double() for v in x.values()))
    p = x["param"].double()
    return float(((given - p) - (right - p)).abs().max() / (right - p).abs().max())


def small_cases(graph, cases=export.cases):
    return ((what, x) for what, x in cases(graph) if x[0].numel() < 10_000)


def sign(folder, file):
    """Make the .json agree with a file that was changed."""
    config = json.loads((folder / "mulo_m.json").read_text())
    config["sha256"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    (folder / "mulo_m.json").write_text(json.dumps(config))
