"""PES against golden vectors and closed forms; particles, micro-batches, processes, memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import GOLDEN

from mulo import estimate, metatrain, pes, roles, tasks, training
from mulo.pes import pes_gradient

ROOT = Path(__file__).parents[1]
CASES = ["noreset", "first", "last", "mixed"]


def flat(z, prefix, names, pairs=True):
    """The arrays prefix/name of a golden file side by side, (n, D), or (D,) for a gradient."""
    parts = [torch.tensor(z[f"{prefix}/{name}"]) for name in names]
    return torch.cat([x.reshape(len(x), -1) if pairs else x.reshape(-1) for x in parts], -1)


@pytest.mark.parametrize("sign", ["", "_sign0.3"])
@pytest.mark.parametrize("case", CASES)
def test_golden_formula(case, sign):
    z = np.load(GOLDEN / "pes_formula.npz")
    delta = torch.tensor(z[f"{case}/p_loss"] - z[f"{case}/n_loss"])
    mask = torch.tensor(z[f"{case}/mask"])
    if sign:
        delta = (0.3 * (delta * mask).mean(0).sign()).expand_as(delta)
    began = torch.tensor(z[f"{case}/is_done"]).cumsum(0) > 0
    eps, xi = (flat(z, f"{case}/{k}", "ab") for k in ("eps", "acc_before"))
    grad, new_xi = pes_gradient(delta, began, mask, eps, xi, float(z["cfg/std"]))
    expected = flat(z, f"{case}{sign}/grad", "ab", pairs=False)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    torch.testing.assert_close(new_xi, flat(z, f"{case}{sign}/acc_after", "ab"))


def test_a_bad_pair_is_left_out():
    """NaN in one pair: the gradient is that of the others; the reference gives NaN for all."""
    z = np.load(GOLDEN / "pes_formula.npz")
    delta = torch.tensor(z["nan/p_loss"] - z["nan/n_loss"])
    mask, began = torch.tensor(z["nan/mask"]), torch.tensor(z["nan/is_done"]).cumsum(0) > 0
    eps, xi = (flat(z, f"nan/{k}", "ab") for k in ("eps", "acc_before"))
    good = torch.where(mask, delta, 0).isfinite().all(0)
    assert 0 < good.sum() < len(good)
    grad, _ = pes_gradient(delta, began, mask, eps, xi, 0.01)
    expected, _ = pes_gradient(
        delta[:, good], began[:, good], mask[:, good], eps[good], xi[good], 0.01
    )
    torch.testing.assert_close(grad, expected)
    assert grad.isfinite().all()


def test_golden_quadratic():
    """The reference's whole schedule on a quadratic: own trajectories, resets, masks, gradients."""
    z = np.load(GOLDEN / "pes_quadratic.npz")
    h, x0 = torch.tensor(z["cfg/h"]), torch.tensor(z["cfg/x0"])
    x = [torch.tensor(z["x_pos_before"][0]), torch.tensor(z["x_neg_before"][0])]  # (n, 3)
    inner, done = torch.tensor(z["inner_step_before"][0]), torch.tensor(z["is_done_before"][0])
    xi = torch.cat(
        [torch.tensor(z["acc_before/drift"][0]), torch.tensor(z["acc_before/log_lr"][0])[:, None]],
        1,
    )
    for call in range(len(z["data"])):
        eps = torch.cat(
            [torch.tensor(z["eps/drift"][call]), torch.tensor(z["eps/log_lr"][call])[:, None]], 1
        )
        theta = torch.cat(
            [torch.tensor(z["theta/drift"][call]), torch.tensor(z["theta/log_lr"][call])[None]]
        )
        deltas, masks, dones = [], [], []
        for data in torch.tensor(z["data"][call]):
            mask, losses = ~done, []
            for side, sign in enumerate((1, -1)):
                phi = theta + sign * eps  # (n, 4)
                losses.append(0.5 * (h * (x[side] - data) ** 2).sum(-1) * mask)
                moved = x[side] - phi[:, 3:].exp() * (h * (x[side] - data) + phi[:, :3])
                x[side] = torch.where(mask[:, None], moved, x0)
            inner = torch.where(mask, inner + 1, 0)
            done = mask & (inner >= int(z["cfg/total_length"]))
            deltas.append(losses[0] - losses[1])
            masks.append(mask)
            dones.append(done)
        np.testing.assert_array_equal(torch.stack(masks), z["mask"][call])
        np.testing.assert_array_equal(torch.stack(dones), z["is_done"][call])
        began = torch.stack(dones).cumsum(0) > 0
        grad, xi = pes_gradient(
            torch.stack(deltas), began, torch.stack(masks), eps, xi, float(z["cfg/std"])
        )
        np.testing.assert_allclose(grad[:3], z["grad/drift"][call], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(grad[3], z["grad/log_lr"][call], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(xi[:, :3], z["acc_after/drift"][call], rtol=1e-5)


def quadratic_unrolls(n, length, truncation, sigma, seed, carry=True):
    """PES on x <- x - exp(phi) x, loss x^2, over whole unrolls from x = 1; the mean gradient."""
    gen = torch.Generator().manual_seed(seed)
    phi = torch.tensor(-2.0, dtype=torch.float64)
    x, xi = torch.ones(2, n, dtype=torch.float64), torch.zeros(n, 1, dtype=torch.float64)
    grads = []
    for _ in range(length // truncation):
        eps = sigma * torch.randn(n, 1, generator=gen, dtype=torch.float64)
        rate = torch.stack([(phi + eps[:, 0]).exp(), (phi - eps[:, 0]).exp()])
        deltas = []
        for _ in range(truncation):
            deltas.append(x[0] ** 2 - x[1] ** 2)
            x = x * (1 - rate)
        delta = torch.stack(deltas)
        no = torch.zeros_like(delta, dtype=torch.bool)
        grad, xi = pes_gradient(delta, no, ~no, eps, xi if carry else 0 * xi, sigma)
        grads.append(grad)
    return torch.stack(grads).mean()


def analytic(length):
    """d/dphi of the mean over t of (1 - e^phi)^(2t)."""
    phi = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
    t = torch.arange(length, dtype=torch.float64)
    (1 - phi.exp()).pow(2 * t).mean().backward()
    return float(phi.grad)


def test_unbiased_on_a_quadratic():
    """The estimate meets the analytic meta-gradient; truncated ES, without xi, does not."""
    expected = analytic(20)
    pes = float(quadratic_unrolls(400_000, 20, 4, 0.01, 0))
    assert pes == pytest.approx(expected, rel=0.03)
    es = float(quadratic_unrolls(400_000, 20, 4, 0.01, 0, carry=False))
    assert abs(es - expected) > 0.2 * abs(expected)


def test_is_plain_es_when_a_truncation_is_the_unroll():
    torch.manual_seed(0)
    delta, eps = torch.randn(10, 6), 0.1 * torch.randn(6, 3)
    no = torch.zeros(10, 6, dtype=torch.bool)
    grad, _ = pes_gradient(delta, no, ~no, eps, torch.zeros(6, 3), 0.1)
    torch.testing.assert_close(grad, (delta.mean(0)[:, None] * eps).mean(0) / (2 * 0.1**2))


TINY = {
    "widths": (8, 16), "pairs": 4, "unroll": 6, "shortest": 3, "truncation": 4, "steps": 6,
    "batch_size": 8, "hidden_size": 4, "lstm_hidden": 6, "param_inits": 5, "warmup": 2,
}  # fmt: skip


def trainer_of(name="mulo_m", **changes):
    r = metatrain.recipe(name, **(TINY | changes))
    return metatrain.Trainer(r, metatrain.new_lo(r))


@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m"])
def test_halves_of_a_pair_share_all_but_phi(name):
    """With (almost) no perturbation both halves stay equal, through resets."""
    trainer = trainer_of(name, sigma=1e-30)
    [particles] = trainer.particles[0]
    n, seen = 4, []
    for _ in range(6):
        delta, began, eps, *_ = particles.truncation(trainer.phi.detach())
        assert not delta.any()
        assert eps.any()
        seen.append(began)
        for p in (*particles.theta.values(), *particles.state.values()):
            assert torch.equal(p[:n], p[n:])
        assert (particles.t <= particles.length).all()
    assert torch.cat(seen[1:]).any()
    assert not torch.equal(*particles.theta["layers.0.weight"][:2])


def test_unrolls_begin_desynchronised_and_last_as_told():
    trainer = trainer_of(pairs=8, unroll=60, shortest=20, truncation=1)
    [particles] = trainer.particles[0]
    lengths, ends = [], []
    for _ in range(150):
        before = particles.t.clone()
        particles.truncation(trainer.phi.detach())
        ends += before[particles.t == 1].tolist()
        lengths.append(particles.length.clone())
    first, later = lengths[0], torch.stack(lengths[-20:])
    assert first.unique().numel() >= 4
    assert first.min() < 20 <= later.min()
    assert later.max() <= 60
    assert len(set(ends)) > 10


def test_divergence_restarts_the_pair_and_spares_the_others():
    trainer = trainer_of(unroll=100, shortest=100, pairs=2)
    [particles] = trainer.particles[0]
    particles.truncation(trainer.phi.detach())
    particles.t[:], particles.length[:] = 5, 100
    particles.theta["layers.0.weight"][0] = float("nan")
    delta, began, _, loss, gone = particles.truncation(trainer.phi.detach())
    assert gone == 1
    assert delta.isfinite().all()
    assert float(loss) < particles.bound
    assert began[:, 0].tolist() == [False, True, True, True]
    assert not began[:, 1].any()
    assert all(p.isfinite().all() for p in particles.theta.values())


def test_micro_batches_change_nothing():
    whole, split = trainer_of("velo_m", micro_batch=4), trainer_of("velo_m", micro_batch=1)
    assert [len(groups) for groups in split.particles] == [4, 4]
    for _ in range(3):
        a, b = whole.advance(), split.advance()
        assert a["meta_loss"] == pytest.approx(b["meta_loss"], rel=1e-5)
        torch.testing.assert_close(whole.phi.grad, split.phi.grad, rtol=1e-3, atol=1e-4)


def test_other_seeds_are_other_runs():
    rows = [trainer_of(seed=seed).advance()["meta_loss"] for seed in (0, 1, 0)]
    assert rows[0] == rows[2] != rows[1]


def test_it_learns():
    """A few dozen outer steps at a tiny size bring the meta-loss down."""
    trainer = trainer_of(widths=(8,), unroll=20, shortest=20, truncation=10, lr=3e-2)
    losses = [trainer.advance()["meta_loss"] for _ in range(60)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02


def test_diverged_nets_are_counted_and_stop_a_run():
    """Updates of any size: all nets fail, and the run says so rather than go on."""
    trainer = trainer_of(lam1=1e30)
    trainer.advance()
    before = trainer.phi.detach().clone()
    with pytest.raises(FloatingPointError, match="as when every net diverges"):
        trainer.advance()
    assert torch.equal(trainer.phi, before)
    gentle = trainer_of(truncation=1)
    assert gentle.advance()["grad_norm"] == 0  # both halves' first losses are alike
    assert gentle.advance()["grad_norm"] > 0


def test_losses_are_clipped(monkeypatch):
    trainer = trainer_of(pairs=2)
    [particles] = trainer.particles[0]
    given = torch.tensor([float("nan"), 50.0, 1.0, -1.0])
    monkeypatch.setattr(particles, "inner_step", lambda net, batch: given)
    delta, _, _, loss, gone = particles.truncation(trainer.phi.detach())
    bound = 1.5 * np.log(10)
    np.testing.assert_allclose(delta[0], [bound - 1, bound], rtol=1e-6)
    assert float(loss) == pytest.approx((2 * bound + 1) / 4)
    assert gone == trainer.recipe.truncation


def test_losses_are_clipped_at_the_tasks_bound(monkeypatch):
    """A regression has no classes: its kind says where, and a diverged net counts as much."""
    monkeypatch.setattr(tasks, "KINDS", dict(tasks.KINDS))
    monkeypatch.setattr(tasks, "FILES", {})
    r = metatrain.recipe("mulo_m", **(TINY | {"kind": str(ROOT / "examples" / "own_task.py")}))
    trainer = metatrain.Trainer(r, metatrain.new_lo(r))
    assert [groups[0].bound for groups in trainer.particles] == [0.75, 0.75]
    assert trainer_of().particles[0][0].bound == pytest.approx(1.5 * np.log(10))
    losses = [trainer.advance()["meta_loss"] for _ in range(3)]
    assert all(0.3 < loss < 0.75 for loss in losses)
    [particles] = trainer.particles[0]
    particles.theta["0.weight"][0] = float("nan")
    particles.t[:], particles.length[:] = 0, 100
    delta = particles.truncation(trainer.phi.detach())[0]
    assert 0 < float(delta[0, 0]) <= 0.75
    meta = metatrain.Trainer(r, metatrain.new_lo(r, "meta"), data=False)
    assert "sines_w8_d3: nets and their state" in estimate.report(meta, estimate.CARDS["a6000"])


def test_gradients_by_independent_bookkeeping():
    """Each step's difference times the sum of the perturbations since that net's own t = 0."""
    trainer = trainer_of(pairs=3, micro_batch=2, truncation=5)
    n, T = 3, 5
    history = [[[] for _ in range(n)] for _ in trainer.tasks]  # perturbations of running unrolls
    grads = []
    original = pes.Particles.truncation

    def spy(particles, phi):
        before = particles.t.clone()
        out = original(particles, phi)
        k, first = next(
            (k, sum(len(p.t) for p in groups[: groups.index(particles)]))
            for k, groups in enumerate(trainer.particles)
            if particles in groups
        )
        delta, began, eps = out[:3]
        for j in range(len(before)):
            mine, total = history[k][first + j], 0.0
            for t in range(T):
                new = bool(began[t, j])
                sum_eps = eps[j] + (0 if new else sum(mine, torch.zeros_like(eps[j])))
                total = total + delta[t, j] * sum_eps / T
            mine[:] = [eps[j]] if bool(began[-1, j]) else [*mine, eps[j]]
            grads.append(total / (2 * trainer.recipe.sigma**2))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pes.Particles, "truncation", spy)
        for _ in range(8):
            grads.clear()
            row = trainer.advance()
            expected = torch.stack(grads).mean(0)
            scale = min(1.0, 1 / row["grad_norm"])
            torch.testing.assert_close(
                trainer.phi.grad, scale * expected, rtol=1e-3, atol=1e-4 * float(scale)
            )
            assert float(trainer.phi.grad.norm()) <= 1.0001


def test_late_losses_weigh_more():
    """With late=1 a loss counts 2t/T times: the same truncation, weighted by hand."""
    plain, late = trainer_of(), trainer_of(late=1.0)
    for _ in range(3):
        [a], [b] = plain.particles[0], late.particles[0]
        delta = a.truncation(plain.phi.detach())[0]
        weighted = b.truncation(late.phi.detach())[0]
        assert torch.equal(a.t, b.t)
    assert delta.any()
    t = a.t - torch.arange(len(delta), 0, -1).unsqueeze(1)  # (T, n), where no unroll began
    running = (t >= 0).all(0)
    assert running.any()
    expected = delta * 2 * t / a.length
    torch.testing.assert_close(weighted[:, running], expected[:, running])


def test_the_cosine_drives_some_pairs():
    """With cosine=0.5 the first half of the pairs train under the schedule, as `train` has it."""
    rates, step = [], training.Learned.step

    def spy(self, *args):
        rates.append(args[-1])
        step(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Learned, "step", spy)
        trainer = trainer_of(cosine=0.5)
        [particles] = trainer.particles[0]
        particles.truncation(trainer.phi.detach())
    n, lr = len(particles.t), rates[-1].flatten()
    share = (particles.t - 1) / particles.length
    assert torch.equal(lr[:n], lr[n:])
    torch.testing.assert_close(lr[: n // 2], training.cosine(share[: n // 2]))
    assert (lr[n // 2 : n] == 1).all()


def test_a_mixture_takes_its_tasks_in_turn():
    """Two of three tasks at each outer step, and no gradient above the clip dominates."""
    names = ("fashion8_mlp_w8_d2", "teacher_mlp_w8_d3_b8", "fashion8_mlp_w4_d4_b32")
    trainer = trainer_of(mixture=names, per_step=2, input_base=64.0, multipliers=True)
    assert [task.batch_size for task in trainer.tasks] == [64, 8, 32]
    rows = [trainer.advance() for _ in range(3)]
    seen = [[np.isfinite(row[f"loss_{name}"]) for name in names] for row in rows]
    assert seen == [[True, True, False], [True, False, True], [False, True, True]]
    assert all(row["grad_norm"] <= 1 for row in rows)
    assert trainer.result().config.input_base == 64


def test_schedule_of_the_rate():
    trainer = trainer_of(warmup=4, steps=20, lr=0.5, lr_end=0.1)
    rates = []
    for trainer.step in range(21):
        rates.append(trainer.rate())
    assert rates[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates[12] == pytest.approx(0.3)
    assert rates[20] == pytest.approx(0.1)


@pytest.mark.parametrize(("name", "rules"), [("mulo_m", roles.ALL), ("velo_m", ())])
def test_tasks_have_the_recipes_parametrization(name, rules):
    assert [task.rules for task in trainer_of(name).tasks] == [rules, rules]


def test_a_restart_leaves_nothing_of_the_old_unroll():
    trainer = trainer_of("muvelo_m", unroll=50, shortest=10)
    [particles] = trainer.particles[0]
    particles.truncation(trainer.phi.detach())
    weights = pes.unflatten(trainer.phi.detach().expand(8, -1), trainer.lo)
    particles._restart(torch.tensor([False, True, False, False]), weights)
    rows = [1, 5]
    theta = {k: p[rows] for k, p in particles.theta.items()}
    fresh = particles.opt.init(
        theta, {k: w[rows] for k, w in weights.items()}, particles.length[[1, 1]]
    )
    for name, x in fresh.items():
        assert torch.equal(particles.state[name][rows], x), name
    assert particles.t.tolist() == [4, 0, 4, 4]
    assert float(particles.state["V/layers.0.weight"][0].sum()) > 0


@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m"])
def test_a_checkpoint_goes_to_the_trainers_device(name):
    """Read on the CPU, as runs do; the meta device stands for a GPU."""
    trainer = trainer_of(name)
    trainer.advance()
    r = trainer.recipe
    other = pes.Trainer(r, metatrain.new_lo(r, "meta"), data=False)
    other.load_state_dict(trainer.state_dict())
    for groups in other.particles:
        for p in groups:
            held = [*p.theta.values(), *p.state.values(), p.xi]
            assert {x.device.type for x in held} == {"meta"}
            assert p.t.device.type == p.length.device.type == "cpu"


@pytest.mark.parametrize("name", ["mulo_m", "muvelo_m", "lo_m"])
def test_three_outer_steps_as_before(name):
    """phi and meta-loss of the release before this one."""
    small = {"widths": (8, 12), "steps": 3, "pairs": 2, "micro_batch": 2, "truncation": 5}
    small |= {"batch_size": 16, "unroll": 9, "shortest": 4, "warmup": 1, "input_base": 0.0}
    small |= {} if "velo" in name else {"lr": 1e-2, "lr_end": 1e-3}
    r = metatrain.recipe(name, lstm_hidden=4, param_inits=6, **small)
    trainer = metatrain.Trainer(r, metatrain.new_lo(r))
    for _ in range(3):
        row = trainer.advance()
    kept = np.load(ROOT / "tests" / "golden" / "regression.npz")
    np.testing.assert_allclose(trainer.phi.detach(), kept[f"pes/{name}"], rtol=0, atol=5e-6)
    assert row["meta_loss"] == pytest.approx(float(kept[f"pes/{name}/meta_loss"]), abs=1e-6)


def test_a_run_of_other_features_is_refused():
    """A checkpoint of a network of another size, as when a feature was added since."""
    trainer = trainer_of()
    state = trainer.state_dict()
    before = trainer.phi.detach().clone()
    with pytest.raises(ValueError, match=r"optimizer has 3 weights, this code's \d+.*start anew"):
        trainer.load_state_dict(state | {"phi": torch.zeros(3), "step": 5})
    assert trainer.step == 0
    assert torch.equal(trainer.phi, before)
