"""Trains a net with an exported learned optimizer: NumPy and onnxruntime, nothing else.

pip install -r examples/requirements.txt    # in an environment of its own
python examples/train.py            # after: python export.py mulo_m && python examples/desk.py

The repository's own environment already has both, and its onnxruntime-gpu would be broken by an
onnxruntime beside it.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import onnxruntime

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "exported")
KINDS = ("matrix", "tall", "vector")


def read_desk():
    """Settings, initial weights (torch's layout: out, in), inputs and labels of every batch."""
    for file in ("desk.json", "desk.bin", *(f"mulo_m.{kind}.onnx" for kind in KINDS)):
        if not (FOLDER / file).exists():
            sys.exit(f"no {FOLDER}/{file}: run python export.py mulo_m && python examples/desk.py")
    about = json.loads((FOLDER / "desk.json").read_text())
    content, arrays, start = (FOLDER / "desk.bin").read_bytes(), {}, 0
    for name, shape, dtype in about["arrays"]:
        arrays[name] = np.frombuffer(content, dtype, math.prod(shape), start).reshape(shape)
        start += arrays[name].nbytes
    x, y = arrays.pop("x"), arrays.pop("y")
    return about, arrays, x, y


def loss_and_gradients(params, x, y, multiplier):
    """Mean cross-entropy of an MLP with ReLU, its logits times `multiplier`; backward by hand."""
    weights = [k for k in params if k.endswith("weight")]
    inputs = []
    for k in weights:
        inputs.append(x)
        z = x @ params[k].T + params[k.replace("weight", "bias")]
        x = np.maximum(z, 0)
    z = multiplier * z
    z -= z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    rows = np.arange(len(y))
    loss = -log_p[rows, y].mean()
    delta = np.exp(log_p)
    delta[rows, y] -= 1
    delta *= multiplier / len(y)
    grads = {}
    for k, x in zip(reversed(weights), reversed(inputs), strict=True):
        grads[k], grads[k.replace("weight", "bias")] = delta.T @ x, delta.sum(0)
        delta = (delta @ params[k]) * (x > 0)
    return loss, grads


class MuLO:
    """The exported step: which graph a tensor needs, and its state."""

    def __init__(self, params, lr_scale):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.graphs = {
            kind: onnxruntime.InferenceSession(
                FOLDER / f"mulo_m.{kind}.onnx", options, providers=["CPUExecutionProvider"]
            )
            for kind in KINDS
        }
        self.lr_scale, self.t, self.state = lr_scale, 0, {}
        for name, p in params.items():
            row, col = (p.shape[0], p.shape[-1])
            shapes = {"second_moment": p.shape, "momentum": (3, *p.shape)}
            shapes |= {"row": (3, row), "col": (3, col)}
            self.state[name] = {k: np.zeros((1, *s), np.float32) for k, s in shapes.items()}

    def step(self, params, grads):
        for name, p in params.items():
            kind = "vector" if p.ndim == 1 else "tall" if p.shape[0] >= p.shape[1] else "matrix"
            graph = self.graphs[kind]
            inputs = {"param": p[None], "grad": grads[name][None], **self.state[name]}
            inputs |= {"step": np.float32(self.t), "lr_scale": [self.lr_scale[name]]}
            inputs = {k: np.asarray(x, np.float32) for k, x in inputs.items()}
            outputs = graph.run(None, inputs)
            new = {k.name[4:]: x for k, x in zip(graph.get_outputs(), outputs, strict=True)}
            params[name] = new.pop("param")[0]
            self.state[name] = new
        self.t += 1


def main():
    about, params, x, y = read_desk()
    opt = MuLO(params, about["lr_scale"])
    for t in range(about["steps"]):
        loss, grads = loss_and_gradients(params, x[t], y[t], about["multiplier"])
        opt.step(params, grads)
        if t % 50 == 0:
            print(f"step {t}: {loss:.4f}")
    loss, _ = loss_and_gradients(params, x[-1], y[-1], about["multiplier"])
    print("loss", loss)


if __name__ == "__main__":
    main()
