"""Roles, the rules by role, and the coordinate check that shows that they hold."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from user_models import MLP, ConvNet, Holder, TiedMLP, Transformer, loss_of, small, task, train

import mulo
from mulo.optimizees import datasets
from mulo.roles import (
    ALL,
    LAYERS,
    TABLES,
    coordinate_check,
    layer_outputs,
    size_factor,
    slope,
    weights_of,
)

FAMILIES = [MLP, ConvNet, Transformer]


def roles_of(module_of_width, width=16, **kwargs):
    return mulo.infer_roles(module_of_width, width, **kwargs)


def groups_of(model, roles, rules=ALL):
    mulo.multiply_outputs_(model, roles, rules)
    return mulo.param_groups(model, roles, rules)


def test_roles_of_three_models():
    assert roles_of(MLP) == {
        "0.weight": "input", "0.bias": "input", "2.weight": "hidden", "2.bias": "input",
        "4.weight": "hidden", "4.bias": "input", "6.weight": "output", "6.bias": "input",
    }  # fmt: skip
    assert {k: v for k, v in roles_of(ConvNet).items() if v != "input"} == {
        "body.weight": "hidden",
        "head.weight": "output",
    }
    assert {k: v for k, v in roles_of(Transformer).items() if v != "input"} == {
        "attention.qkv.weight": "hidden",
        "attention.proj.weight": "hidden",
        "up.weight": "hidden",
        "down.weight": "hidden",
        "head.weight": "output",
    }


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda w: nn.Conv1d(w, w, 3), {"weight": "hidden", "bias": "input"}),
        (lambda w: nn.Conv3d(3, w, 3), {"weight": "input", "bias": "input"}),
        (lambda w: nn.Conv2d(w, 7, 1), {"weight": "output", "bias": "input"}),
        (lambda w: nn.ConvTranspose2d(w, 3, 2, bias=False), {"weight": "output"}),
        (lambda w: nn.ConvTranspose2d(3, w, 2, bias=False), {"weight": "input"}),
        (lambda w: nn.Conv2d(w, w, 3, groups=w, bias=False), {"weight": "input"}),
        (lambda w: nn.ConvTranspose2d(w, w, 3, groups=w, bias=False), {"weight": "input"}),
        (lambda w: nn.ConvTranspose2d(w, w, 3, groups=4, bias=False), {"weight": "hidden"}),
        (lambda w: nn.Embedding(100, w), {"weight": "input"}),
        (lambda w: nn.BatchNorm2d(w), {"weight": "input", "bias": "input"}),
        (lambda w: nn.LayerNorm((4, w)), {"weight": "input", "bias": "input"}),
        (lambda w: nn.PReLU(w), {"weight": "input"}),
        (
            lambda w: nn.MultiheadAttention(w, 4, add_bias_kv=True, bias=False),
            {
                "in_proj_weight": "hidden",
                "out_proj.weight": "hidden",
                "bias_k": "input",
                "bias_v": "input",
            },
        ),
        (
            lambda w: nn.LSTM(9, w, bias=False),
            {"weight_ih_l0": "input", "weight_hh_l0": "hidden"},
        ),
        (lambda w: Holder(w=nn.Parameter(torch.zeros(w, 3 * w))), {"w": "hidden"}),
        (lambda w: Holder(pos=nn.Parameter(torch.zeros(1, 9, w))), {"pos": "input"}),
        (lambda w: Holder(cls=nn.Parameter(torch.zeros(1, w))), {"cls": "input"}),
        (lambda w: Holder(scale=nn.Parameter(torch.zeros(()), True), l=nn.Linear(4, w)),
         {"scale": "input", "l.weight": "input", "l.bias": "input"}),
        (lambda w: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, w, bias=False)),
         {"0.weight": "input", "0.bias": "input", "1.weight": "input"}),
    ],
)  # fmt: skip
def test_roles_of_layers(build, expected):
    assert roles_of(build) == expected


SIZES = st.tuples(
    st.integers(1, 3), st.booleans()
)  # of a layer's output: (a number, whether it is multiplied by width)
NORMS = [None, nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm, lambda n: nn.GroupNorm(1, n)]


@given(
    kind=st.sampled_from(["linear", "conv1", "conv2", "transposed"]),
    embedding=st.booleans(),
    sizes=st.lists(SIZES, min_size=1, max_size=5).filter(lambda sizes: any(w for _, w in sizes)),
    options=st.lists(
        st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from(NORMS)), min_size=5, max_size=5
    ),
    width=st.integers(1, 12),
)
def test_roles_of_random_nets(kind, embedding, sizes, options, width):
    """By construction: hidden if both sides of a layer grow, output if only its input side does."""
    layer = {"linear": lambda i, o, k, bias: nn.Linear(i, o, bias)}
    layer |= {"conv1": nn.Conv1d, "conv2": nn.Conv2d, "transposed": nn.ConvTranspose2d}
    area = {"linear": 0, "conv1": 1}.get(kind, 2)

    def build(w):
        parts, inputs = [], 3
        for n, ((size, grows), (kernel, bias, norm)) in enumerate(zip(sizes, options)):  # noqa: B905
            outputs = size * (w if grows else 1)
            if n == 0 and embedding:
                parts.append(nn.Embedding(11, outputs))
            else:
                parts.append(layer[kind](inputs, outputs, kernel, bias=bias))
            parts += [norm(outputs)] if norm else []
            inputs = outputs
        return nn.Sequential(*parts)

    model, expected, scales = build(width), {}, {}
    before, grew = 3, False
    layers = (x for x in model.named_children() if isinstance(x[1], (*LAYERS, *TABLES)))
    for (name, part), (_, grows), (kernel, *_) in zip(layers, sizes, options):  # noqa: B905
        role = {(True, True): "hidden", (True, False): "output"}.get((grew, grows), "input")
        expected[f"{name}.weight"] = role
        scales[part.weight] = 1 / (before * kernel**area) if role == "hidden" else 1.0
        before, grew = part.weight.shape[weights_of(part)[0].out_axis], grows
    roles = roles_of(build, width)
    assert roles == dict.fromkeys(dict(model.named_parameters()), "input") | expected
    for group in groups_of(model, roles):
        assert all(group["scale"] == pytest.approx(scales.get(p, 1.0)) for p in group["params"])


def test_a_bare_table_is_input_with_a_warning():
    with pytest.warns(UserWarning, match=r"'pos' \(1\) are taken as tables.*mulo\.Readout"):
        roles = roles_of(lambda w: Holder(pos=nn.Parameter(torch.zeros(9, w))))
    assert roles == {"pos": "input"}


class Matmul(nn.Module):
    """x @ W: one matrix, or one per expert."""

    def __init__(self, fan_in, fan_out, experts=(), out_axis=None):
        super().__init__()
        self.W = nn.Parameter(torch.zeros(*experts, fan_in, fan_out))
        if out_axis is not None:
            self.out_axis = {"W": out_axis}

    def forward(self, x):
        return x @ self.W


def test_the_orientation_of_a_bare_matrix():
    """Unknown, it warns; `out_axis` on its module gives fan_in, init, scale and role."""
    with pytest.warns(UserWarning, match=r"'W' \(1\) are taken as \(out, in\).*out_axis = "):
        roles_of(lambda w: Matmul(w, 4 * w))
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
    with pytest.raises(ValueError, match="must be one of its last two axes"):
        roles_of(lambda w: Matmul(w, w, (3,), out_axis=0))


def test_a_stack_of_matrices():
    """Experts as one parameter: the role needs `out_axis`, the fan_in is that of one expert."""
    with pytest.raises(ValueError, match=r"out_axis = \{'W': -2\} on its module if it is a stack"):
        roles_of(lambda w: Matmul(w, 4 * w, (3,)))
    for axis, fan_in, group_axis in ((-1, 8, -1), (2, 8, -1), (-2, 32, 1), (1, 32, 1)):
        build = lambda w: Matmul(w, 4 * w, (3,), axis)  # noqa: B023, E731
        (group,) = mulo.param_groups(build(8), roles_of(build))
        assert (group["scale"], group["out_axis"], group["area"]) == (1 / fan_in, group_axis, 1)
        opt = mulo.MuLO([group], small())
        group["params"][0].square().sum().backward()
        opt.step()


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
    scales = {n: g for g in mulo.param_groups(model, roles) for n in g["names"]}
    assert scales["1.weight"]["scale"] == 1 / 16
    assert scales["1.weight"]["out_axis"] == 1
    assert scales["1.bias"]["kind"] == "bias"
    assert float(model[1].weight.detach().var()) == pytest.approx(1 / 16, rel=0.2)
    x = torch.randn(2, 64)
    plain = x @ model[2].weight + model[2].bias
    torch.testing.assert_close(model[2](x), plain / 64)
    assert list(layer_outputs(model, torch.randn(2, 3))) == ["0", "1", "2"]


class Inner(nn.Sequential):
    """Only the inner size grows: its second layer looks like an output."""

    def __init__(self, width):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, width), nn.Linear(width, 4), nn.Linear(4, 2))


def heads(width):
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2), nn.Linear(width, 3))


@pytest.mark.parametrize(
    ("build", "names"), [(Inner, r"'2\.weight' \(1\)"), (heads, r"'1\.weight', '2\.weight' \(2\)")]
)
def test_doubtful_outputs_warn(build, names):
    fix = "scale every inner size with the width, or give the others the role 'hidden'"
    with pytest.warns(UserWarning, match=rf"^{names} are outputs.*{fix}"):
        roles_of(build)


@pytest.mark.parametrize("build", [*FAMILIES, TiedMLP])
def test_usual_models_do_not_warn(build):
    with warnings.catch_warnings(action="error"):
        roles_of(build)


def test_padding_rows_stay_zero():
    def build(w):
        bag = nn.EmbeddingBag(9, w, padding_idx=1)
        return nn.ModuleList([nn.Embedding(9, w, padding_idx=0), bag, nn.Embedding(9, w)])

    model = mulo.init_(build(8), roles_of(build))
    zero_rows = [m.weight.eq(0).all(1).nonzero().flatten().tolist() for m in model]
    assert zero_rows == [[0], [1], []]


def bare_and_tied(w):
    model = Holder(tokens=nn.Embedding(50, w), rest=Holder(w=None))
    model.rest.w = model.tokens.weight
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (bare_and_tied, "'rest.w' is tied to 'tokens.weight'.*untie"),
        (lambda w: nn.Bilinear(w, w, w), "'weight'.*fits no role: .*else write the roles by hand"),
        (lambda w: nn.Linear(4, 5), "no parameter grows between build\\(16\\)"),
        (lambda w: nn.Sequential(*[nn.Linear(w, w)] + [nn.Linear(w, 2)] * (w > 16)), "same param"),
        (lambda w: nn.Linear(4, int(torch.ones(w).sum().item())), "device='cpu'"),
        (lambda w: nn.Linear(4, int(torch.ones(w).numpy().sum())), "device='cpu'"),
        (lambda w: nn.utils.parametrizations.weight_norm(nn.Linear(4, w)), "remove weight_norm"),
        (lambda w: nn.utils.parametrizations.spectral_norm(nn.Linear(w, w)), "parametrization"),
    ],
)
def test_models_without_roles_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        roles_of(build)


def test_a_constructor_that_reads_values_needs_the_cpu():
    roles = roles_of(lambda w: nn.Linear(4, int(torch.ones(w).sum().item())), device="cpu")
    assert roles == {"weight": "input", "bias": "input"}


@pytest.mark.parametrize("error", [RuntimeError, TypeError, KeyError])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors_of_the_model_itself_are_passed_on(error, device):
    def build(w):
        raise error("my metadata")

    with pytest.raises(error, match=r"^'?my metadata'?$"):
        roles_of(build, device=device)


def test_layers_that_share_a_weight_have_one_role():
    def build(w):
        model = nn.Sequential(
            nn.Linear(4, w), nn.Linear(w, w, bias=False), nn.Linear(w, w, bias=False)
        )
        model[2].weight = model[1].weight
        return model

    roles = roles_of(build)
    assert roles == {"0.weight": "input", "0.bias": "input", "1.weight": "hidden"}
    assert len(groups_of(build(8), roles)) == 3  # fan_in 4, 1 and 8


FAN_IN = {  # of each hidden weight, and of the output, at width w
    MLP: ({"2.weight": 1, "4.weight": 1}, 1),
    ConvNet: ({"body.weight": 9}, 1),
    Transformer: (
        {"attention.qkv.weight": 1, "attention.proj.weight": 1, "up.weight": 1, "down.weight": 4}, 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [32, 128])
def test_the_table(family, width):
    """Init variance, multiplier and update scale, at half and at double width, are the table's."""
    roles = roles_of(family)
    model = mulo.init_(family(width), roles, zero_output=False)
    hidden, out = FAN_IN[family]
    scales = {
        id(p): group["scale"] for group in mulo.param_groups(model, roles) for p in group["params"]
    }
    for name, p in model.named_parameters():
        expected = 1 / (hidden[name] * width) if name in hidden else 1.0
        assert scales[id(p)] == pytest.approx(expected)
        if p.ndim >= 2 and name != "positions":
            variance = 1.0
            if roles[name] != "output" and name != "tokens.weight":
                variance = 1 / (p.numel() // p.shape[0])
            assert float(p.detach().var()) == pytest.approx(variance, rel=8 / p.numel() ** 0.5)
    head = model[-1] if family is MLP else model.head
    x = torch.randn(3, width)
    torch.testing.assert_close(head(x), (x @ head.weight.T + head.bias) / (out * width))


def test_rules_switch_off_one_by_one():
    roles = roles_of(MLP)
    for rules in ((), ("init",), ("multiplier",), ("update",), ALL):
        model = mulo.init_(MLP(64), roles, rules=rules, zero_output=False)
        scale = {
            id(p): group["scale"]
            for group in mulo.param_groups(model, roles, rules=rules)
            for p in group["params"]
        }
        assert scale[id(model[2].weight)] == (1 / 64 if "update" in rules else 1.0)
        variance = 1.0 if "init" in rules else 1 / 64
        assert float(model[6].weight.detach().var()) == pytest.approx(variance, rel=0.3)
        x = torch.randn(2, 64)
        plain = nn.functional.linear(x, model[6].weight, model[6].bias)
        factor = 64 if "multiplier" in rules else 1
        torch.testing.assert_close(model[6](x), plain / factor)
    with pytest.raises(ValueError, match=r"unknown rules \['uptade'\]: use any of"):
        mulo.param_groups(MLP(8), roles, rules=("uptade",))


def test_init_leaves_alone_what_it_should():
    """Zero biases, norms and bare tables stay; other biases become N(0, 1); the output is zero."""
    torch.manual_seed(0)
    roles = roles_of(Transformer)
    model = Transformer(256)
    nn.init.zeros_(model.down.bias)
    before = copy.deepcopy(model)
    mulo.init_(model, roles, generator=torch.Generator().manual_seed(0))
    for name in ("positions", "norm1.weight", "norm1.bias", "down.bias"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))
    assert float(model.up.bias.detach().std()) == pytest.approx(1, rel=0.1)
    assert not model.head.weight.any()
    assert float(model.tokens.weight.detach().std()) == pytest.approx(1, rel=0.1)
    again = mulo.init_(Transformer(256), roles, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.up.weight, again.up.weight)


@pytest.mark.parametrize("rules", [(), ("multiplier", "update")])
def test_layer_biases_are_zero_without_the_init_rule(rules):
    """As in `Task.init`; norms are left alone, and under μP biases are N(0, 1)."""
    roles, model = roles_of(Transformer), Transformer(64)
    nn.init.ones_(model.norm1.bias)
    mulo.init_(model, roles, rules)
    assert not any(layer.bias.any() for layer in (model.up, model.down, model.head))
    assert (model.norm1.bias == 1).all()
    biased = mulo.init_(Transformer(64), roles, (*rules, "init"))
    assert float(biased.up.bias.detach().std()) == pytest.approx(1, rel=0.2)


def test_roles_by_hand_and_their_errors():
    roles = roles_of(MLP)
    with pytest.raises(ValueError, match=r"'6\.weight' is 'none': give it one of \('input'"):
        mulo.param_groups(MLP(8), {k: v for k, v in roles.items() if k != "6.weight"})
    with pytest.raises(ValueError, match=r"'6\.weight' is 'readout': give it one of"):
        mulo.init_(MLP(8), roles | {"6.weight": "readout"})
    with pytest.raises(ValueError, match=r"no parameter '8\.weight': infer the roles"):
        mulo.init_(MLP(8), roles | {"8.weight": "hidden"})
    bare = Holder(w=nn.Parameter(torch.randn(3, 8)))
    with pytest.raises(ValueError, match=r"'w' is an output but not the weight of a layer"):
        mulo.init_(bare, {"w": "output"})
    mulo.init_(bare, {"w": "output"}, rules=("init", "update"), zero_output=False)
    groups = groups_of(MLP(8), dict.fromkeys(roles, "hidden"))
    assert {g["scale"] for g in groups} == {1.0, 1 / 8, 1 / 12}
    with pytest.raises(TypeError, match="build must be a function"):
        mulo.infer_roles(MLP(8), 8)
    with pytest.raises(TypeError, match=r"must be an nn\.Module, not NoneType"):
        mulo.infer_roles(lambda w: None, 8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rules", [ALL, ()])
def test_groups_have_names_roles_and_kinds(family, rules):
    """Names are parallel to params; all tensors of a group have its role and its kind."""
    model, roles, seen = family(8), roles_of(family), set()
    for group in groups_of(model, roles, rules):
        named = dict(zip(group["names"], group["params"], strict=True))
        assert all(model.get_parameter(name) is p for name, p in named.items())
        assert {group["role"]} == {roles[name] for name in named}
        assert group["kind"] != "norm" or group["role"] == "input"
        seen |= named.keys()
    assert seen == roles.keys()


def test_the_table_of_groups():
    model = nn.Sequential(nn.Linear(3, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2))
    roles = dict.fromkeys((n for n, _ in model.named_parameters()), "input")
    roles |= {f"{k}.weight": "hidden" for k in (1, 2, 3)} | {"4.weight": "output"}
    opt = mulo.MuLO(groups_of(model, roles), mulo.SmallFC())
    opt.param_groups[0]["lr"] = torch.tensor(0.5)
    assert repr(opt).splitlines() == [
        "MuLO (small_fc)",
        "kind    tensors  scale  lr   shapes",
        "input   1        1      0.5  8x3",
        "bias    5        1      1    8 (4), 2",
        "hidden  3        0.125  1    8x8 (3)",
        "output  1        1      1    2x8 4.weight",
    ]
    for group in (opt.param_groups[1], opt.param_groups[3]):  # split by hand, with all names
        del group["params"][:1]
    assert repr(opt).splitlines()[3:] == [
        "bias    4        1      1    8 (3), 2",
        "hidden  3        0.125  1    8x8 (3)",
        "output  0        1      1",
    ]
    many = mulo.MuLO([nn.Parameter(torch.zeros(n)) for n in range(1, 7)], mulo.SmallFC())
    assert repr(many).splitlines()[-1] == "none  6        1      1   1, 2, 3, 4, ..."


def test_wrapped_models_keep_their_roles():
    roles = roles_of(MLP)
    plain = mulo.init_(MLP(8), roles)
    groups = len(mulo.param_groups(plain, roles))
    compiled = torch.compile(plain, backend="eager")
    for model in (compiled, nn.DataParallel(compiled), torch.compile(nn.DataParallel(plain))):
        assert len(mulo.param_groups(model, roles)) == groups
    plain[2] = checkpoint_wrapper(plain[2])
    assert len(mulo.param_groups(plain, roles)) == groups


def test_coordinate_check_leaves_running_statistics_alone():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    coordinate_check(lambda w: (model, lambda: None), torch.randn(5, 3), [8, 16], steps=1)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_layer_outputs():
    """By name and in order, for the model's own parameters or for others."""
    model, other, x = MLP(8), MLP(8), torch.randn(5, 12)
    outputs = layer_outputs(model, x, dict(other.named_parameters()))
    assert list(outputs) == ["0", "2", "4", "6"]
    assert torch.equal(outputs["6"], other(x))
    assert torch.equal(layer_outputs(model, x)["6"], model(x))


def test_frozen_parameters_wait_for_a_gradient():
    """They stay in their groups without state; unfrozen, they train. Integers are left out."""
    net, roles, (x, y) = MLP(8), roles_of(MLP), task(MLP)
    net[0].weight.requires_grad_(False)
    mulo.init_(net, roles)
    opt, before = mulo.MuLO(mulo.param_groups(net, roles), small()), net[0].weight.clone()
    train(net, opt, 2, x, y)
    assert torch.equal(net[0].weight, before)
    assert net[0].weight not in opt.state
    net[0].weight.requires_grad_(True)
    train(net, opt, 2, x, y)
    assert not torch.equal(net[0].weight, before)
    net[2].weight = nn.Parameter(torch.ones(8, 8, dtype=torch.uint8), requires_grad=False)
    assert "2.weight" not in {n for g in mulo.param_groups(net, roles) for n in g["names"]}


def check(family, rules=ALL, eps="relative", widths=(64, 512), steps=4):
    """Coordinate check of an untrained learned optimizer, whose updates are O(1) times lam1.

    Relative epsilons show the effect of the rules alone. The reference's fixed epsilons change the
    features as gradients shrink with width; depending on the LO, that adds up to ±0.2 to a slope.
    """
    x, y = task(family, batch=64 if family is MLP else 16)
    roles = roles_of(family)

    def setup(width):
        gen = torch.Generator().manual_seed(0)
        model = mulo.init_(family(width), roles, rules=rules, generator=gen)
        config = mulo.LOConfig(hidden_size=8, lam1=0.01, eps=eps)
        lo = mulo.SmallFC(config, torch.Generator().manual_seed(1))
        opt = mulo.MuLO(mulo.param_groups(model, roles, rules=rules), lo)

        def train():
            opt.zero_grad()
            loss_of(model, x, y).backward()
            opt.step()

        return model, train

    return coordinate_check(setup, x, list(widths), steps).slopes


@pytest.mark.parametrize("family", FAMILIES)
def test_coordinate_check(family):
    """Under μP no layer's drift depends on width; without a rule, some layer's clearly does."""
    for eps in ("relative", "reference"):
        result = check(family, eps=eps)
        assert len(result) == {MLP: 4, ConvNet: 3, Transformer: 5}[family]
        for name, slopes in result.items():
            assert slopes.abs().max() <= 0.1, (eps, name, slopes)
    hidden = next(iter(FAN_IN[family][0])).removesuffix(".weight")
    out = "6" if family is MLP else "head"
    for rules, layer in ((("init", "multiplier"), hidden), (("init", "update"), out)):
        assert check(family, rules, widths=(64, 256))[layer][-1] > 0.5


def drift_by_input_size(input_base):
    """Slope of the first layer's drift against the size of images, after five steps."""

    def drift(side):
        def build(width):
            return nn.Sequential(nn.Linear(side**2, width), nn.ReLU(), nn.Linear(width, 10))

        gen, roles = torch.Generator().manual_seed(0), mulo.infer_roles(build, 64)
        model = mulo.init_(build(64), roles, generator=gen)
        x, y = datasets.load("fashion10k", size=side).batch(gen, 64)
        lo = mulo.load("mulo_m", input_base=input_base)
        opt, x = mulo.MuLO(mulo.param_groups(model, roles), lo), x.flatten(1)
        before = model[0](x)
        for _ in range(5):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        return (model[0](x) - before).detach().std()

    sides = [8, 14, 28]
    return float(slope([side**2 for side in sides], torch.stack([drift(n) for n in sides])))


def test_coordinate_check_against_input_size():
    """With the input rule the first layer moves as far for images of any size."""
    assert abs(drift_by_input_size(64.0)) <= 0.1
    assert drift_by_input_size(None) > 0.5


def test_factors_beyond_the_paper():
    """Only input layers and hidden convolutions have one, and only if the config says so."""

    def build(width):
        body = nn.Conv2d(width, width, 3), nn.GroupNorm(2, width), nn.Flatten()
        return nn.Sequential(nn.Conv2d(2, width, 5), *body, nn.Linear(width, 3))

    groups = groups_of(build(8), mulo.infer_roles(build, 8))
    found = {g["kind"]: g for g in groups}
    assert set(found) == {"input", "conv", "output", "norm", "bias"}
    assert (found["input"]["fan_in"], found["conv"]["area"]) == (50, 9)
    for kind, g in found.items():
        at = kind, g["fan_in"], g["area"]
        assert size_factor(*at, mulo.LOConfig()) == 1
        for base, expected in ((100.0, 2), (1000.0, 4)):
            config = mulo.LOConfig(input_base=base, by_channels=True)
            assert size_factor(*at, config) == {"input": expected, "conv": 9}.get(kind, 1)
