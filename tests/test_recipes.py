"""Recipes: the paper's numbers, and what is refused."""

import pytest

from mulo import recipes
from mulo.roles import ALL

PAPER = {  # name: mup, lam1, widths, net, hidden size, truncation, steps
    "mulo_s": (True, 0.01, (128,), "small_fc", 32, 50, 5000),
    "mulo_m": (True, 0.01, (128, 512, 1024), "small_fc", 32, 50, 5000),
    "muvelo_m": (True, 0.001, (128, 512, 1024), "velo", 4, 20, 45_000),
    "lo_s": (False, 0.001, (128,), "small_fc", 32, 50, 5000),
    "lo_m": (False, 0.001, (128, 512, 1024), "small_fc", 32, 50, 5000),
    "velo_m": (False, 0.001, (128, 512, 1024), "velo", 4, 20, 45_000),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes(name):
    r, desk = recipes.recipe(name, "paper"), recipes.recipe(name)
    own = (r.mup, r.lam1, r.widths, r.net, r.hidden_size, r.truncation, r.steps)
    assert own == PAPER[name]
    assert (r.kind, r.depth, r.batch_size, r.unroll, r.pairs) == ("in32_mlp", 3, 4096, 1000, 8)
    assert (r.sigma, r.warmup, r.lr, r.lr_end) == (0.01, 100, 3e-3, 1e-3)
    assert (desk.scale, desk.mup, desk.net) == ("desk", r.mup, r.net)
    assert desk.lam1 == (1e-4 if name == "velo_m" else r.lam1)
    assert len(desk.widths) == len(r.widths)
    config = recipes.new_lo(r).config
    assert not config.param_scale_mult
    assert config.t_max == (1000 if r.net == "small_fc" else None)
    assert config.input_base == (3072 if r.mup else None)
    assert {task.rules for task in r.tasks()} == {ALL if r.mup else ()}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "adam"}, "unknown recipe 'adam': use one of mulo_s"),
        ({"scale": "large"}, "unknown scale 'large': use one of desk, paper"),
        ({"unroll": 50}, "shortest=500 exceeds unroll=50"),
        ({"backend": "fast"}, "unknown backend 'fast': use auto, kernel, folded or literal"),
    ],
)
def test_numbers_that_are_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        recipes.recipe(**({"name": "mulo_m"} | changes))
