"""Configuration and networks of learned optimizers."""

import numpy as np
import pytest
import torch
from golden_files import Golden

import mulo
from lo import LOConfig


def test_config_refuses_nonsense():
    for bad, message in (
        ({"net": "adam"}, "net='adam' is unknown"),
        ({"spec": "mine"}, "spec='mine' is unknown"),
        ({"eps": 1e-8}, "eps=1e-08 is unknown"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"eps_rms": -1.0}, "eps_rms must be a number of 0 or more"),
        ({"lam1": "x"}, "lam1 must be a number"),
        ({"lam2": None}, "lam2 must be a number"),
        ({"t_max": float("nan")}, "t_max must be None or a number above 0"),
        ({"t_max": 0}, "t_max must be None or a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LOConfig(**bad)


def test_initial_weights():
    """Truncated normal of variance about 1/fan_in, zero biases and offsets; sizes add up."""
    net = mulo.SmallFC(LOConfig(hidden_size=32))
    assert sum(p.numel() for p in net.parameters()) == 2402 + 7
    assert net.w1.abs().max() <= 2 / 32**0.5
    assert float(net.w1.std()) == pytest.approx(0.88 / 32**0.5, rel=0.1)
    assert not net.b0.any()
    assert not net.momentum_decays.any()
    released = mulo.VeLO(LOConfig(net="velo", hidden_size=4, lstm_hidden=512, param_inits=256))
    assert sum(p.numel() for p in released.parameters()) == pytest.approx(2.3e6, rel=0.03)


def test_bare_network():
    """SmallFC called on features gives the reference's direction and magnitude."""
    golden = Golden("small_fc_h32_sp")
    net = golden.lo()
    for k, s in enumerate(golden["cfg/feat_steps"]):
        for n in golden.names:
            out = net(torch.tensor(golden[f"feat/{n}/in39"][k])).numpy()
            for i, name in enumerate(("direction", "magnitude")):
                expected = golden[f"out/{n}/{name}"][s]
                np.testing.assert_allclose(
                    out[..., i], expected, rtol=2e-3, atol=2e-5 * abs(expected).max()
                )
