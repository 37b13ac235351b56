"""Train a net with an exported learned optimizer, with NumPy and onnxruntime; see README.md.

python export.py mulo_m && python examples/desk.py && python examples/embed.py
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import onnxruntime

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "exported")
for file in ("desk.json", "desk.bin", "mulo_m.json", "mulo_m.tensor.onnx", "mulo_m.vector.onnx"):
    if not (FOLDER / file).exists():
        commands = (
            f"python export.py mulo_m --out {FOLDER} && python examples/desk.py --out {FOLDER}"
        )
        sys.exit(f"no {FOLDER}/{file}: run {commands}")
desk, mulo = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("desk", "mulo_m"))

# The task: initial weights in torch's layout (out, in), and batches.
params, start = {}, 0
for name, shape, dtype in desk["arrays"]:
    array = np.fromfile(FOLDER / "desk.bin", dtype, math.prod(shape), offset=start)
    params[name], start = array.reshape(shape), start + array.nbytes
inputs, labels = params.pop("x"), params.pop("y")


def loss_and_gradients(x, y):
    """Mean cross-entropy of an MLP with ReLU and a μP output layer; backward by hand."""
    names, layers, rows = [k[:-7] for k in params if k.endswith(".weight")], [], np.arange(len(y))
    for k in names:
        layers.append(x)
        z = x @ params[f"{k}.weight"].T + params[f"{k}.bias"]
        x = np.maximum(z, 0)
    multiplier = layers[-1].shape[1] ** mulo["mup"]["output"]["output multiplier"]  # step 0
    z = multiplier * z
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    delta, grads = np.exp(log_p) * multiplier / len(y), {}
    delta[rows, y] -= multiplier / len(y)
    for k, x in zip(reversed(names), reversed(layers), strict=True):
        grads |= {f"{k}.weight": delta.T @ x, f"{k}.bias": delta.sum(0)}
        delta = (delta @ params[f"{k}.weight"]) * (x > 0)
    return -log_p[rows, y].mean(), grads


def to_graph(p):  # step 1: tall weights are transposed
    return p[None] if p.ndim == 1 else (p.T if p.shape[0] >= p.shape[1] else p)[None, None]


def from_graph(x, p):
    return x[0] if p.ndim == 1 else x[0, 0].T if p.shape[0] >= p.shape[1] else x[0, 0]


state, graphs = {}, {}
for kind in mulo["graphs"]:
    graphs[kind] = onnxruntime.InferenceSession(FOLDER / f"mulo_m.{kind}.onnx")
for name, p in params.items():  # step 2
    kind, fan_in, axes = ("vector", 1, "bn") if p.ndim == 1 else ("tensor", p.shape[1], "bemn")
    sizes = dict(zip(axes, to_graph(p).shape, strict=True))
    role, base = desk["roles"][name], mulo["lo"]["input_base"]
    scale = fan_in ** mulo["mup"][role]["update"]  # step 0
    if base and role == "input" and p.ndim > 1:
        scale *= min(base / fan_in, 4)
    state[name] = {"scale": np.float32([scale]), "decay": np.float32([0])}
    for x in mulo["graphs"][kind]["inputs"]:
        if "first" in x:
            zeros = np.zeros([sizes.get(d, d) for d in x["shape"]], np.float32)
            state[name][x["name"]] = zeros + np.float32(x["first"])

for t in range(desk["steps"]):
    loss, grads = loss_and_gradients(inputs[t], labels[t])
    for name, p in params.items():  # step 3
        graph = graphs["vector" if p.ndim == 1 else "tensor"]
        x = {"p": to_graph(p), "g": to_graph(grads[name]), "t": np.float32([t])} | state[name]
        for output, y in zip(graph.get_outputs(), graph.run(None, x), strict=True):
            state[name][output.name.removeprefix("new_")] = y
        params[name] = from_graph(state[name].pop("p"), p)
    if t % 50 == 0:
        print(f"step {t}: {loss:.4f}")
print("loss", loss_and_gradients(inputs[-1], labels[-1])[0])
