"""Roles, the rules by role, and the coordinate checks that show that they hold."""

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from user_models import MLP, ConvNet, Holder, TiedMLP, Transformer, task, train

import mulo
from mulo.optimizees import datasets
from mulo.roles import ALL, LAYERS, TABLES, divisor_of, layer_outputs, size_factor, slope

FAMILIES = {  # fan_in / width of each hidden weight
    MLP: {"2.weight": 1, "4.weight": 1},
    ConvNet: {"body.weight": 9},
    Transformer: {"attention.qkv.weight": 1, "attention.proj.weight": 1}
    | {"up.weight": 1, "down.weight": 4},
}


def roles_of(build, width=16, **kwargs):
    return mulo.infer_roles(build, width, **kwargs)


def options(groups, key):
    """{name: value of this key in its group}."""
    return {name: group[key] for group in groups for name in group["names"]}


def groups_of(model, roles, rules=ALL):
    mulo.multiply_outputs_(model, roles, rules)
    return mulo.param_groups(model, roles, rules)


def bare(*shape):
    return nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table(family):
    """Roles of three models, without a warning; at another width, init variance, multiplier and
    update scale are the table's."""
    with warnings.catch_warnings(action="error"):
        roles, width, hidden = roles_of(family), 64, FAMILIES[family]
    head = "6.weight" if family is MLP else "head.weight"
    expected = dict.fromkeys(hidden, "hidden") | {head: "output"}
    assert {name: role for name, role in roles.items() if role != "input"} == expected
    model = mulo.init_(family(width), roles, zero_output=False)
    assert roles.keys() == dict(model.named_parameters()).keys()
    groups = mulo.param_groups(model, roles)
    assert options(groups, "role") == roles
    scales = {name: 1 / (hidden[name] * width) if name in hidden else 1.0 for name in roles}
    assert options(groups, "scale") == pytest.approx(scales)
    for name, p in model.named_parameters():
        if p.ndim >= 2 and name != "positions":
            unit = roles[name] == "output" or name == "tokens.weight"
            variance = 1.0 if unit else 1 / (p.numel() // p.shape[0])
            assert float(p.detach().var()) == pytest.approx(variance, rel=8 / p.numel() ** 0.5)
    head, x = model.get_submodule(head.removesuffix(".weight")), torch.randn(3, width)
    torch.testing.assert_close(head(x), (x @ head.weight.T + head.bias) / width)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda w: nn.Conv2d(w, w, 3, groups=w, bias=False), {"weight": "input"}),
        (lambda w: nn.ConvTranspose2d(w, w, 3, groups=w, bias=False), {"weight": "input"}),
        (lambda w: nn.ConvTranspose2d(w, w, 3, groups=4, bias=False), {"weight": "hidden"}),
        (lambda w: nn.LayerNorm((4, w)), {"weight": "input", "bias": "input"}),
        (lambda w: nn.MultiheadAttention(w, 4, add_bias_kv=True, bias=False),
         {"in_proj_weight": "hidden", "out_proj.weight": "hidden"}
         | {"bias_k": "input", "bias_v": "input"}),
        (lambda w: nn.LSTM(9, w, bias=False), {"weight_ih_l0": "input", "weight_hh_l0": "hidden"}),
        (lambda w: Holder(pos=bare(1, 9, w)), {"pos": "input"}),
        (lambda w: Holder(cls=bare(1, w)), {"cls": "input"}),
        (lambda w: Holder(scale=bare(), table=nn.Embedding(9, w)),
         {"scale": "input", "table.weight": "input"}),
        (lambda w: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, w, bias=False)),
         {"0.weight": "input", "0.bias": "input", "1.weight": "input"}),
    ],
)  # fmt: skip
def test_roles_of_layers(build, expected):
    assert roles_of(build) == expected


NORMS = [None, nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, lambda n: nn.GroupNorm(1, n)]
PARTS = st.tuples(  # of a net: outputs, times width if True; kernel; bias; norm
    st.integers(1, 3), st.booleans(), st.integers(1, 3), st.booleans(), st.sampled_from(NORMS)
)


@given(
    kind=st.sampled_from(["linear", "conv1", "conv2", "transposed"]),
    embedding=st.booleans(),
    parts=st.lists(PARTS, min_size=1, max_size=5).filter(lambda parts: any(x[1] for x in parts)),
    width=st.integers(1, 12),
)
def test_roles_of_random_nets(kind, embedding, parts, width):
    """By construction: hidden if both sides of a layer grow, output if only its input side does."""
    layer = {"linear": lambda i, o, k, bias: nn.Linear(i, o, bias)}
    layer |= {"conv1": nn.Conv1d, "conv2": nn.Conv2d, "transposed": nn.ConvTranspose2d}
    area = {"linear": 0, "conv1": 1}.get(kind, 2)

    def build(w):
        modules, inputs = [], 3
        for size, grows, kernel, bias, norm in parts:
            outputs = size * w if grows else size
            if embedding and not modules:
                modules.append(nn.Embedding(11, outputs))
            else:
                modules.append(layer[kind](inputs, outputs, kernel, bias=bias))
            modules += [norm(outputs)] if norm else []
            inputs = outputs
        return nn.Sequential(*modules)

    model, inputs, grew = build(width), 3, False
    layers = [x for x in model.named_children() if isinstance(x[1], (*LAYERS, *TABLES))]
    expected, scales = dict.fromkeys(dict(model.named_parameters()), "input"), {}
    for (name, module), (size, grows, kernel, *_) in zip(layers, parts, strict=True):
        role = {(True, True): "hidden", (True, False): "output"}.get((grew, grows), "input")
        expected[f"{name}.weight"] = role
        scales[module.weight] = 1 / (inputs * kernel**area) if role == "hidden" else 1.0
        inputs, grew = size * width if grows else size, grows
    roles = roles_of(build, width)
    assert roles == expected
    for group in groups_of(model, roles):
        assert all(group["scale"] == pytest.approx(scales.get(p, 1.0)) for p in group["params"])


class Matmul(nn.Module):
    """x @ W: one matrix, or one per expert."""

    def __init__(self, fan_in, fan_out, experts=(), out_axis=None):
        super().__init__()
        self.W = bare(*experts, fan_in, fan_out)
        if out_axis is not None:
            self.out_axis = {"W": out_axis}

    def forward(self, x):
        return x @ self.W


def inner_size(width):  # its third layer looks like an output
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 2))


def two_heads(width):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2), nn.Linear(width, 3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda w: Holder(pos=bare(9, w)), r"^'pos' \(1\) are taken as tables.*mulo\.Readout"),
        (lambda w: Matmul(w, 4 * w), r"^'W' \(1\) are taken as \(out, in\): if W is"),
        (inner_size, r"^'2\.weight' \(1\) are taken as outputs.*let its size grow"),
        (two_heads, r"^'1\.weight', '2\.weight' \(2\) are taken as outputs.*make it 'hidden'"),
    ],
)
def test_doubtful_roles_warn(build, message):
    with pytest.warns(UserWarning, match=message):
        roles_of(build)


def test_the_orientation_of_a_bare_matrix():
    """`out_axis` on its module gives fan_in, init, scale and role; also for a stack of experts."""
    for axis, fan_in in ((1, 64), (-1, 64), (0, 256)):
        build = lambda w: Matmul(w, 4 * w, out_axis=axis)  # noqa: B023, E731
        with warnings.catch_warnings(action="error"):
            roles = roles_of(build)
        model = mulo.init_(copy.deepcopy(build(64)), roles)
        (group,) = mulo.param_groups(model, roles)
        assert (group["fan_in"], group["scale"], group["kind"]) == (fan_in, 1 / fan_in, "hidden")
        assert group["out_axis"] == axis % 2
        assert float(model.W.detach().var()) == pytest.approx(1 / fan_in, rel=0.1)
    assert roles_of(lambda w: Matmul(3, w, out_axis=1)) == {"W": "input"}  # not a table
    assert roles_of(lambda w: Matmul(w, 3, out_axis=1)) == {"W": "output"}
    for axis, fan_in, group_axis in ((-1, 8, -1), (2, 8, -1), (-2, 32, 1), (1, 32, 1)):
        build = lambda w: Matmul(w, 4 * w, (3,), axis)  # noqa: B023, E731
        (group,) = mulo.param_groups(build(8), roles_of(build))
        assert (group["scale"], group["out_axis"], group["area"]) == (1 / fan_in, group_axis, 1)


class Conv1D(nn.Module):
    """As in transformers: linear, and stores (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight = nf, nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.ones(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def test_conv1d_of_transformers():
    def build(w):
        return nn.Sequential(Conv1D(w, 3), Conv1D(4 * w, w), Conv1D(5, 4 * w))

    roles = roles_of(build)
    assert [roles[f"{k}.weight"] for k in range(3)] == ["input", "hidden", "output"]
    model = mulo.init_(build(16), roles, zero_output=False)
    groups = {n: g for g in mulo.param_groups(model, roles) for n in g["names"]}
    assert (groups["1.weight"]["scale"], groups["1.weight"]["out_axis"]) == (1 / 16, 1)
    assert groups["1.bias"]["kind"] == "bias"
    assert float(model[1].weight.detach().var()) == pytest.approx(1 / 16, rel=0.2)
    x = torch.randn(2, 64)
    torch.testing.assert_close(model[2](x), (x @ model[2].weight + model[2].bias) / 64)
    assert list(layer_outputs(model, torch.randn(2, 3))) == ["0", "1", "2"]


def bare_and_tied(w):
    model = Holder(tokens=nn.Embedding(50, w), rest=Holder(w=None))
    model.rest.w = model.tokens.weight
    return model


def reads_values(w):
    return nn.Linear(4, int(torch.ones(w).sum().item()))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (bare_and_tied, "'rest.w' is tied to 'tokens.weight', a table: untie"),
        (lambda w: nn.Bilinear(w, w, w), "'weight'.*fits no role"),
        (lambda w: Matmul(w, 4 * w, (3,)), r"stack of matrices W, set out_axis = \{'W': -2\}"),
        (lambda w: Matmul(w, w, (3,), out_axis=0), "must be one of the last two"),
        (lambda w: nn.Linear(4, 5), r"no parameter grows from build\(16\)"),
        (lambda w: nn.LSTM(9, w, num_layers=w // 16), "one of two widths only"),
        (lambda w: weight_norm(nn.Linear(4, w)), "remove its parametrization"),
        (lambda w: spectral_norm(nn.Linear(w, w)), "remove its parametrization"),
        (lambda w: None, r"must be an nn\.Module, not NoneType"),
        (MLP(8), "build must be a function"),
        (reads_values, "meta device: pass device='cpu'"),
    ],
)
def test_models_without_roles_are_refused(build, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        roles_of(build)


def test_widths_are_checked():
    with pytest.raises(ValueError, match="width must be an integer of 1 or more, not 0"):
        mulo.infer_roles(MLP, 0)
    with pytest.raises(ValueError, match=r"widths must be two or more, not \[16\]"):
        mulo.roles.coordinate_check(None, None, [16])


def test_a_constructor_that_reads_values_needs_the_cpu():
    assert roles_of(reads_values, device="cpu") == {"weight": "input", "bias": "input"}


def test_rules_switch_off_one_by_one():
    roles, model = roles_of(MLP), MLP(64)
    model[6] = mulo.Readout(64, 5)
    for rules in ((), ("init",), ("multiplier",), ("update",), ALL, ALL):
        mulo.init_(model, roles, rules=rules, zero_output=False)
        scales = options(mulo.param_groups(model, roles, rules=rules), "scale")
        assert scales["2.weight"] == (1 / 64 if "update" in rules else 1.0)
        variance = 1.0 if "init" in rules else 1 / 64
        assert float(model[6].weight.detach().var()) == pytest.approx(variance, rel=0.3)
        assert divisor_of(model[6]) == (64 if "multiplier" in rules else 1)
    with pytest.raises(ValueError, match=r"unknown rules \['uptade'\]: use any of"):
        mulo.param_groups(MLP(8), roles, rules=("uptade",))


def test_init_leaves_alone_what_it_should():
    """Zero biases, norms and bare tables stay; other biases become N(0, 1), or 0 without the rule;
    the output is zero."""
    torch.manual_seed(0)
    roles, model = roles_of(Transformer), Transformer(256)
    nn.init.zeros_(model.down.bias)
    nn.init.ones_(model.norm1.bias)
    before = copy.deepcopy(model)
    mulo.init_(model, roles, generator=torch.Generator().manual_seed(0))
    for name in ("positions", "norm1.weight", "norm1.bias", "down.bias"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    assert float(model.up.bias.detach().std()) == pytest.approx(1, rel=0.1)
    assert not model.head.weight.any()
    again = mulo.init_(Transformer(256), roles, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.up.weight, again.up.weight)
    plain = mulo.init_(before, roles, ("multiplier", "update"))
    assert not any(layer.bias.any() for layer in (plain.up, plain.down, plain.head))
    assert (plain.norm1.bias == 1).all()


def test_padding_rows_stay_zero():
    """Also of an embedding that is tied to a head, which may be defined before it."""

    def build(w):
        bag = nn.EmbeddingBag(9, w, padding_idx=1)
        head, tokens = nn.Linear(w, 9, bias=False), nn.Embedding(9, w, padding_idx=0)
        head.weight = tokens.weight
        return nn.ModuleList([head, bag, nn.Embedding(9, w), tokens])

    roles = roles_of(build)
    assert roles == {"0.weight": "output", "1.weight": "input", "2.weight": "input"}
    model = mulo.init_(build(8), roles)
    zero_rows = [m.weight.eq(0).all(1).nonzero().flatten().tolist() for m in model]
    assert zero_rows == [[0], [1], [], [0]]


def test_roles_by_hand_and_their_errors():
    roles = roles_of(MLP)
    with pytest.raises(ValueError, match=r"role of .*'6\.weight' is .* one of \('input'"):
        mulo.param_groups(MLP(8), {k: v for k, v in roles.items() if k != "6.weight"})
    with pytest.raises(ValueError, match=r"no parameter '8\.weight': infer the roles"):
        mulo.init_(MLP(8), roles | {"8.weight": "hidden"})
    groups = groups_of(MLP(8), dict.fromkeys(roles, "hidden"))
    assert {g["scale"] for g in groups} == {1.0, 1 / 8, 1 / 12}
    model = Holder(head=nn.Linear(8, 5, bias=False), w=nn.Parameter(torch.ones(4, 8)))
    before, roles = copy.deepcopy(model.state_dict()), {"head.weight": "output", "w": "output"}
    with pytest.raises(ValueError, match="'w' is an output but not the weight of a layer"):
        mulo.init_(model, roles)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert divisor_of(model.head) == 1
    mulo.init_(model, roles, rules=("init", "update"), zero_output=False)


def test_wrapped_models_keep_their_roles():
    roles = roles_of(MLP)
    plain = mulo.init_(MLP(8), roles)
    groups = len(mulo.param_groups(plain, roles))
    compiled = torch.compile(plain, backend="eager")
    for model in (compiled, nn.DataParallel(compiled), torch.compile(nn.DataParallel(plain))):
        assert len(mulo.param_groups(model, roles)) == groups
    plain[2] = checkpoint_wrapper(plain[2])
    assert len(mulo.param_groups(plain, roles)) == groups


def test_layer_outputs_do_not_change_running_statistics():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))
    before = copy.deepcopy(model.state_dict())
    layer_outputs(model, torch.randn(5, 3))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_quantized_weights_are_left_out():
    net = MLP(8)
    net[2].weight = nn.Parameter(torch.ones(8, 8, dtype=torch.uint8), requires_grad=False)
    assert "2.weight" not in options(groups_of(net, roles_of(MLP)), "role")


# Coordinate checks


def slopes_of(family, lo, rules=ALL, widths=(64, 256), repeats=1):
    """The slopes of each layer after each of four steps."""
    x, y = task(family, batch=64 if family is MLP else 16)
    roles, seeds = roles_of(family), itertools.cycle(range(repeats))

    def setup(width):
        gen = torch.Generator().manual_seed(next(seeds))
        model = mulo.init_(family(width), roles, rules=rules, generator=gen)
        opt = mulo.MuLO(mulo.param_groups(model, roles, rules=rules), lo, backend="folded")
        return model, lambda: train(model, opt, 1, x, y)

    return mulo.roles.coordinate_check(setup, x, list(widths), steps=4, repeats=repeats)


@pytest.mark.parametrize("family", [*FAMILIES, TiedMLP])
def test_coordinate_check(family):
    """Under μP no layer's drift depends on width; without a rule, some layer's clearly does.

    An untrained learned optimizer has updates that are O(1) times lam1. Relative epsilons show the
    effect of the rules alone. The reference's fixed epsilons change the features as gradients
    shrink with width; depending on the LO, that adds up to ±0.2 to a slope.
    """
    tied, config = family is TiedMLP, mulo.LOConfig(hidden_size=8, lam1=0.01, eps="relative")
    untrained = mulo.SmallFC(config, torch.Generator().manual_seed(1))
    lo = mulo.load("mulo_m") if tied else untrained
    sizes = {"widths": (256, 1024), "repeats": 3} if tied else {"widths": (64, 512)}
    result = slopes_of(family, lo, **sizes)
    assert len(result) == {MLP: 4, ConvNet: 3, Transformer: 5, TiedMLP: 2}[family]
    for name, slopes in result.items():
        assert slopes.abs().max() <= 0.1, (name, slopes)
    wrong = slopes_of(family, lo, ("init", "update"))["6" if family is MLP else "head"]
    assert wrong[-1] > 0.5
    if not tied:
        hidden = next(iter(FAMILIES[family])).removesuffix(".weight")
        assert slopes_of(family, lo, ("init", "multiplier"))[hidden][-1] > 0.5


def first_layers_drift(side, input_base):
    """How far the first layer's output for images of this size moves in five steps."""

    def build(width):
        return nn.Sequential(nn.Linear(side**2, width), nn.ReLU(), nn.Linear(width, 10))

    gen, roles = torch.Generator().manual_seed(0), mulo.infer_roles(build, 64)
    model = mulo.init_(build(64), roles, generator=gen)
    x, y = datasets.load("fashion10k", size=side).batch(gen, 64)
    lo = mulo.load("mulo_m", input_base=input_base)
    opt, x = mulo.MuLO(mulo.param_groups(model, roles), lo), x.flatten(1)
    before = model[0](x)
    train(model, opt, 5, x, y)
    return (model[0](x) - before).detach().std()


def test_coordinate_check_against_input_size():
    """With the input rule the first layer moves as far for images of any size."""
    sides = [8, 14, 28]
    for input_base, passes in ((64.0, lambda x: abs(x) <= 0.1), (None, lambda x: x > 0.5)):
        drifts = torch.stack([first_layers_drift(side, input_base) for side in sides])
        assert passes(slope([side**2 for side in sides], drifts))


def test_factors_beyond_the_paper():
    """Only input layers and hidden convolutions have one, and only if the config says so."""

    def build(width):
        body = nn.Conv2d(width, width, 3), nn.GroupNorm(2, width), nn.Flatten()
        return nn.Sequential(nn.Conv2d(2, width, 5), *body, nn.Linear(width, 3))

    groups = {g["kind"]: g for g in groups_of(build(8), mulo.infer_roles(build, 8))}
    assert set(groups) == {"input", "conv", "output", "norm", "bias"}
    assert (groups["input"]["fan_in"], groups["conv"]["area"]) == (50, 9)
    for kind, g in groups.items():
        at = kind, g["fan_in"], g["area"]
        assert size_factor(*at, mulo.LOConfig()) == 1
        for base, expected in ((100.0, 2), (1000.0, 4)):
            config = mulo.LOConfig(input_base=base, by_channels=True)
            assert size_factor(*at, config) == {"input": expected, "conv": 9}.get(kind, 1)
