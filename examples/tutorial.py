# %% [markdown]
# # Learned optimizers under μP, from the beginning
#
# Twelve steps, in two minutes on a laptop: `python examples/tutorial.py`, or cell by cell in an
# editor that supports `# %%`. Figures are saved in runs/tutorial. The paper is "μLO:
# Compute-Efficient Meta-Generalization of Learned Optimizers".

# %%
import math
import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))
import mulo
from mulo import features, recipes, tasks, training
from mulo.metatrain import Trainer, pes_gradient, unflatten

torch.set_num_threads(1)  # these nets are so small that threads slow them down
torch.manual_seed(0)
OUT = Path("runs/tutorial")
OUT.mkdir(parents=True, exist_ok=True)


def show(name, curves, xlabel, ylabel, **axes):
    """Save a figure of labelled (x, y) curves."""
    fig, ax = plt.subplots(figsize=(5.5, 3.5), constrained_layout=True)
    for label, (x, y) in curves.items():
        ax.plot(x, y, label=label)
    ax.set(xlabel=xlabel, ylabel=ylabel, **axes)
    ax.legend()
    fig.savefig(OUT / f"{name}.png", dpi=110)
    plt.close(fig)
    print(f"   figure: {OUT / name}.png")


# %% [markdown]
# ## 1. An update rule is a function
#
# It takes a parameter, its gradient and some memory, and returns the new parameter. SGD and Adam
# are update rules written by hand.

# %%
task = tasks.get("fashion8_mlp_w32_d3")  # an MLP of three layers, 32 wide, on 8x8 images of clothes
data = task.data()


def sgd(p, g, memory, t):
    return p - 5.0 * g, memory


def adam(p, g, memory, t):
    m, v = memory if memory else (torch.zeros_like(p), torch.zeros_like(p))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    step = (m / (1 - 0.9 ** (t + 1))) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
    return p - 0.03 * step, (m, v)


def train(update, steps=150):
    generator = torch.Generator().manual_seed(0)
    theta, memory, losses = task.init(1, generator), {}, []  # the net: {name: (1, *shape)}
    for t in range(steps):
        batch = training.batches(data, [generator], task.batch_size)
        loss, grads = training.gradients(task, theta, batch)
        for name, g in grads.items():
            theta[name], memory[name] = update(theta[name], g, memory.get(name), t)
        losses.append(float(loss))
    return losses


curves = {"SGD": train(sgd), "Adam": train(adam)}
print("1. final loss:", {k: round(sum(x[-20:]) / 20, 3) for k, x in curves.items()})
show("1_rules", {k: (range(150), x) for k, x in curves.items()}, "step", "loss", ylim=(0, 3))

# %% [markdown]
# ## 2. Replace the rule by a network
#
# A learned optimizer is a tiny MLP. It sees 39 features of each parameter (gradient, momenta,
# second moments, time: `features.py`) and outputs the direction d and log-magnitude m of the step,
# eq. 2: p <- p - lambda_1 d exp(lambda_2 m). The same MLP serves every parameter of every net.

# %%
lo = mulo.SmallFC(mulo.LOConfig(hidden_size=8, lam1=0.05), torch.Generator().manual_seed(0))
p, g = torch.randn(1, 3, 4), torch.randn(1, 3, 4)  # one 3 x 4 weight, and its gradient
dims = features.factored_dims((3, 4))  # which axes are averaged over for row and column features
memory = features.init_accumulators(p, dims)
memory, new_p = mulo.step(
    lo.config, mulo.stacked(lo), memory, p, g, torch.zeros(1), torch.ones(1), dims
)
print(f"2. the update by a network of {sum(w.numel() for w in lo.parameters())} weights:")
print(new_p - p)

# %% [markdown]
# ## 3. A task, 4. an unroll, 5. the meta-loss
#
# An unroll trains a net for T steps with the learned optimizer. The meta-loss L(phi), eq. 1, is the
# mean loss over these steps; phi are the optimizer's weights. Random weights train badly.

# %%
steps = 100
start = training.train(task, lo, steps, seeds=[0, 1, 2])  # (steps, seeds): the training losses
trained = training.train(task, mulo.load("mulo_m"), steps, seeds=[0, 1, 2])
print(f"3-5. meta-loss over {steps} steps: random {start.mean():.3f}, trained {trained.mean():.3f}")
unrolls = {"random phi": start.mean(1), "meta-trained phi": trained.mean(1)}
show("5_unroll", {k: (range(steps), x) for k, x in unrolls.items()}, "step", "loss", ylim=(0, 3))

# %% [markdown]
# ## 6. Why not backpropagate through the unroll?
#
# The step is differentiable, so backpropagation through all T steps gives dL/dphi. But training is
# close to chaotic: the longer the unroll, the larger and noisier that gradient.

# %%
flat = torch.nn.utils.parameters_to_vector(lo.parameters()).detach()
scales = {k: g["scale"] for k, g in training.groups_of(task).items()}  # of μP


def last_loss(phi, T, seed, graph=False):
    """The loss after T steps of each of P optimizers phi (P, D); with a graph, differentiable."""
    P, generator, weights = len(phi), torch.Generator().manual_seed(seed), unflatten(phi, lo)
    theta = {k: p.repeat_interleave(P, 0) for k, p in task.init(1, generator).items()}
    dims = {k: features.factored_dims(p.shape[1:]) for k, p in theta.items()}
    memory = {k: features.init_accumulators(p, dims[k]) for k, p in theta.items()}
    for t in range(T + 1):
        batch = training.batches(data, [generator], task.batch_size, copies=P)
        theta = {k: p if p.requires_grad else p.requires_grad_() for k, p in theta.items()}
        loss = task.losses(theta, batch)
        if t == T:
            return loss
        grads = torch.autograd.grad(loss.sum(), list(theta.values()), create_graph=graph)
        now = torch.full((P,), float(t))
        with torch.set_grad_enabled(graph):
            for (k, p), g in zip(list(theta.items()), grads, strict=True):
                scale = torch.full((P,), scales[k])
                memory[k], theta[k] = mulo.step(
                    lo.config, weights, memory[k], p, g, now, scale, dims[k]
                )


sizes = []
for T in (1, 4, 16, 48):
    phi = flat.clone().requires_grad_()
    grads = [torch.autograd.grad(last_loss(phi[None], T, s, True).sum(), phi)[0] for s in range(3)]
    sizes.append(torch.stack([g.norm() for g in grads]))
    print(f"6. gradient through {T:2} steps, three nets: ", [f"{x:.3g}" for x in sizes[-1]])

# %% [markdown]
# ## 7. Evolution strategies
#
# Evolution strategies use only the losses: train pairs of nets with phi + eps and phi - eps, and
# weigh eps by the difference of their losses. On average that is the gradient of a smoothed
# meta-loss. It is noisy; more pairs reduce the noise.

# %%
sigma, D = 0.05, len(flat)


def es_gradient(pairs, seed, T=20):
    eps = sigma * torch.randn(pairs, D, generator=torch.Generator().manual_seed(seed))
    losses = last_loss(torch.cat([flat + eps, flat - eps]), T, seed=0).detach()
    delta = (losses[:pairs] - losses[pairs:])[None]  # (1, pairs): one step of new unrolls
    new, xi = torch.ones_like(delta, dtype=torch.bool), torch.zeros(pairs, D)
    return pes_gradient(delta, new, eps, xi, sigma)[0]


for pairs in (8, 64, 512):
    a, b = es_gradient(pairs, 1), es_gradient(pairs, 2)
    cos = torch.cosine_similarity(a, b, 0)
    print(f"7. {pairs:3} pairs: two estimates agree to cos = {cos:.2f}")

# %% [markdown]
# ## 8. Persistent evolution strategies: your own μLO
#
# Waiting for whole unrolls is slow. PES cuts them into truncations, makes an outer step after each,
# and keeps for each pair the sum of its perturbations so far, which removes the bias of short
# truncations (`metatrain.py`). Here it makes 60 outer steps on widths 8 and 16.

# %%
small = {"widths": (8, 16), "hidden_size": 4, "unroll": 100, "shortest": 100, "truncation": 20}
small |= {"steps": 60, "warmup": 10, "pairs": 8, "lr": 2e-2}


def meta_train(name):
    recipe = recipes.recipe(name, **small)
    trainer = Trainer(recipe, recipes.new_lo(recipe))
    losses = [trainer.advance()["meta_loss"] for _ in range(recipe.steps)]
    return trainer.result(), losses


mine, meta_losses = meta_train("mulo_m")
end = sum(meta_losses[-10:]) / 10
print(f"8. meta-loss {meta_losses[0]:.3f} -> {end:.3f} in {len(meta_losses)} outer steps")
show("8_meta", {"my μLO": (range(len(meta_losses)), meta_losses)}, "outer step", "meta-loss")

# %% [markdown]
# ## 9. Wider nets: standard parametrization breaks, μP repairs
#
# The same step on a wider net moves its outputs more, because they sum over more inputs. So an
# optimizer that was meta-trained on narrow nets takes too large steps. μP scales by role (hidden
# updates by 1/fan_in, the output by 1/fan_in, `roles.py`), so that steps suit every width. The two
# optimizers are shipped, meta-trained at widths 16 to 64: lo_m in standard parametrization (SP),
# mulo_m under μP, each with the λ1 of the paper.

# %%
widths, ends = (64, 256, 1024), {"lo_m": [], "mulo_m": []}
for name, final in ends.items():
    for width in widths:
        rules = mulo.roles.ALL if name == "mulo_m" else ()
        wide = tasks.get(f"fashion8_mlp_w{width}_d3", rules=rules)
        final.append(float(training.train(wide, mulo.load(name), 300, seeds=[0])[-20:].mean()))
    print(f"9. {name}: loss after 300 steps at widths {widths}: {[round(x, 3) for x in final]}")
show("9_width", {k: (widths, x) for k, x in ends.items()}, "width", "loss", xscale="log")

# %% [markdown]
# ## 10. Your μLO trains a net it has never seen
#
# Another architecture, other data, another width: give a function that builds the model, and the
# roles follow. It was meta-trained for 100 steps and half a minute; `weights/` has better ones.


# %%
def build(width):
    return torch.nn.Sequential(
        torch.nn.Linear(10, width), torch.nn.Tanh(), torch.nn.Linear(width, width),
        torch.nn.Tanh(), torch.nn.Linear(width, 4),
    )  # fmt: skip


torch.manual_seed(0)
roles = mulo.infer_roles(build, 128)
x = torch.randn(2048, 10)
y = (x @ torch.randn(10, 4)).argmax(1)
for name, optimizer in {"my μLO": mine, "the shipped mulo_m": mulo.load("mulo_m")}.items():
    torch.manual_seed(1)
    model = mulo.init_(build(128), roles)
    opt = mulo.MuLO(mulo.param_groups(model, roles), optimizer)
    for _ in range(100):
        i = torch.randint(len(x), (64,))
        loss = torch.nn.functional.cross_entropy(model(x[i]), y[i])
        loss.backward()
        opt.step()
        opt.zero_grad()
    print(f"10. {name}: loss {math.log(4):.3f} -> {loss:.3f}")

# %% [markdown]
# ## 11. Your first hack: a new input
#
# The features are one dict, in `features.parameter_features`. Names, counts and the size of the
# network follow from it, so a new feature is one line. For example, the sign of the gradient:
#
# ```diff
# --- a/features.py
# +++ b/features.py
# @@ def parameter_features
#      x = {"g": g}
# +    x["sign(g)"] = g.sign()
#      if kind != "small_fc":
# ```
#
# `python metatrain.py --steps 20 --out runs/sign` then meta-trains a network of 40 inputs. The
# kernels do not have the new feature, so the folded step runs, with a warning; checkpoints of 39
# inputs are refused.

# %% [markdown]
# ## 12. Your own task
#
# A script can register a kind of task: a model, its data and its loss.
#
# ```python
# tasks.register("sines", build, Sines, loss, loss_bound=0.75)
# ```
#
# `examples/own_task.py` registers a regression. `python examples/own_task.py` meta-trains on it; it
# compares optimizers if `evaluate task sines_w64_d3 --optimizers mulo_m adamw_default` follows.
