"""ONNX graphs against float64: an independent oracle, long sums, blocks, other optimizers."""

import math

import numpy as np
import onnx
import onnxscript.optimizer
import oracle
import pytest
import torch
from exported_files import error, inputs_of

import graphs
import mulo
from serving import Session


@pytest.mark.parametrize("shape", [(5, 7), (1, 9), (1, 1), (6,)], ids=str)
def test_onnx_against_the_oracle(exported, shape):
    """Five steps beside an independent derivation in float64; ties as JAX has them: d0 is last."""
    lo = mulo.load("mulo_m")
    meta = {k: w.numpy() for k, w in lo.named_parameters()}
    session = Session(exported / f"mulo_m.{'vector' if len(shape) == 1 else 'matrix'}.onnx")
    rng = np.random.default_rng(0)
    tensor = oracle.Tensor(rng.standard_normal(shape).astype(np.float32), meta)
    p = torch.tensor(tensor.p, dtype=torch.float32)[None]
    state = {"second_moment": torch.zeros_like(p), "momentum": torch.zeros(1, 3, *shape)}
    state |= {"row": torch.zeros(1, 3, shape[0]), "col": torch.zeros(1, 3, shape[-1])}
    for t in (0, 1, 2, 700, 100_000):
        g = (0.01 * rng.standard_normal(shape)).astype(np.float32)
        x = {"param": p, "grad": torch.tensor(g)[None], "step": torch.tensor(float(t))}
        rate = max(1, t / 500) ** 0.5  # against annealing, so that the update stays of size 1
        out = session.run(x | state | {"lr_scale": torch.tensor([rate / lo.config.lam1])})
        tensor.p = p[0].double().numpy()
        update = oracle.small_fc_step(
            tensor, meta, g, t, 1.0, lo.config.lam2, rate, t_max=500.0, anneal=0.5
        )
        p = out.pop("new_param")
        off = np.abs(p[0].double().numpy() - tensor.p).max()
        assert off <= 3e-6 * np.abs(update).max()
        state = {k[4:]: v for k, v in out.items()}


CASES = {
    "wide, constant": (("matrix", dict(b=1, m=2, n=100_001)), 0.01),
    "tall, constant": (("tall", dict(b=1, m=30_000, n=3)), 0.01),
    "many rows, constant": (("tall", dict(b=1, m=3000, n=40)), 0.01),
    "vector, constant": (("vector", dict(b=1, n=300_001)), 0.01),
    "long row, constant": (("matrix", dict(b=1, m=1, n=1_000_001)), 0.01),
    "long vector, constant": (("vector", dict(b=1, n=2_000_001)), 0.01),
    "many small slices, constant": (("tensor", dict(b=1, e=300_000, m=2, n=2)), 0.01),
    "wide, zero": (("matrix", dict(b=1, m=3, n=65_537)), 0.0),
    "huge": (("matrix", dict(b=2, m=6, n=7)), 1e8),
    "tiny": (("matrix", dict(b=2, m=6, n=7)), 1e-12),
}


@pytest.mark.parametrize("name", CASES)
def test_long_sums_and_extreme_gradients(exported, name):
    """Equal entries are the worst case of adding one after another."""
    (kind, sizes), value = CASES[name]
    graph = graphs.make(mulo.load("mulo_m"), kind)
    x = inputs_of(graph, torch.Generator().manual_seed(0), **sizes)
    x["grad"] = torch.full_like(x["grad"], value)
    for k in ("second_moment", "momentum", "row", "col"):
        x[k] = torch.full_like(x[k], value if k == "momentum" else value**2)
    assert error(Session(exported / f"mulo_m.{kind}.onnx"), graph, x) <= 3e-6


@pytest.mark.parametrize("kind", ["matrix", "tall", "tensor"])
def test_blocks_change_nothing(exported, kind):
    """Cut into blocks of any size, also where the last one is shorter than the others."""
    graph, file = graphs.make(mulo.load("mulo_m"), kind), exported / f"mulo_m.{kind}.onnx"
    m, n = (13, 11) if kind == "tall" else (11, 13)
    x = inputs_of(graph, torch.Generator().manual_seed(0), b=2, e=3, m=m, n=n)
    whole = Session(file, block=10**9).run(x)
    for block in (1, 66, 150, 300):
        assert error(Session(file, block=block), graph, x) <= 3e-6
        parts = Session(file, block=block).run(x)
        for k, v in whole.items():
            torch.testing.assert_close(parts[k], v, rtol=0, atol=2e-6 * float(v.abs().max()))


def test_bad_gradients_count_as_zero(exported):
    graph = graphs.make(mulo.load("mulo_m"), "matrix")
    session = Session(exported / "mulo_m.matrix.onnx")
    x = inputs_of(graph, torch.Generator().manual_seed(0), b=1, m=4, n=5)
    x["grad"][0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    given = session.run(x)
    x["grad"][0, 0, :3] = 0
    assert all(torch.equal(given[k], v) for k, v in session.run(x).items())


def test_epsilons_survive_other_optimizers(exported, tmp_path):
    """torch's ONNX optimizer deletes additions of 1e-8 where it can: here it cannot."""
    model = onnxscript.optimizer.optimize(onnx.load(exported / "mulo_m.matrix.onnx"))
    file = tmp_path / "optimized.onnx"
    onnx.save(model, file)
    graph = graphs.make(mulo.load("mulo_m"), "matrix")
    for value in (0.0, 0.01):
        x = inputs_of(graph, torch.Generator().manual_seed(0), b=2, m=4, n=5)
        for k in ("grad", "second_moment", "momentum", "row", "col"):
            x[k] = x[k] * value
            x[k][0, ..., 0] = 0
        assert error(Session(file), graph, x) <= 3e-6
