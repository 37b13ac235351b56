"""The division of outputs by fan_in: set, checked, folded; tied readouts and pretrained weights."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from user_models import MLP, ConvNet, Holder, TiedMLP, Transformer, loss_of, task, train

import mulo
from mulo.roles import ALL, coordinate_check


def roles_of(build, width=16):
    return mulo.infer_roles(build, width)


def test_param_groups_checks_the_divisions():
    """A new head, a forgotten init_ and other roles or rules are refused."""
    roles = roles_of(MLP)
    model = mulo.init_(MLP(8), roles)
    hidden = roles | {"4.weight": "output"}
    for other, rules in ((hidden, ALL), (roles, ()), (roles | {"6.weight": "hidden"}, ALL)):
        with pytest.raises(ValueError, match=r"the output of layer '[46]' is divided by \d, but.*"):
            mulo.param_groups(model, other, rules)
    wider = nn.Linear(8, 5)
    model[6] = wider
    with pytest.raises(ValueError, match=r"layer '6' is divided by 1.*by 8: call mulo\.init_ or"):
        mulo.param_groups(model, roles)
    mulo.param_groups(model, roles, ("init", "update"))  # whoever divides by hand
    model[6] = mulo.Readout(8, 5)
    mulo.param_groups(model, roles)


def test_layers_that_share_an_output_weight_are_all_divided():
    def build(w):
        model = nn.Sequential(nn.Linear(3, w), nn.Linear(w, 2), nn.Linear(w, 2))
        model[2].weight = model[1].weight
        return model

    model, x = mulo.init_(build(8), roles_of(build), zero_output=False), torch.randn(4, 8)
    torch.testing.assert_close(model[2](x), (x @ model[1].weight.T + model[2].bias) / 8)


@pytest.mark.parametrize("family", [MLP, ConvNet, Transformer])
def test_fold_outputs(family):
    """The same function of plain weights; and back, to train on."""
    roles, (x, _) = roles_of(family), task(family)
    model = mulo.init_(family(16), roles, zero_output=False)
    before = model(x)
    plain = family(16)
    plain.load_state_dict(mulo.fold_outputs_(model).state_dict())
    torch.testing.assert_close(plain(x), before)
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(ValueError, match="is divided by 1"):
        mulo.param_groups(plain, roles)
    for _ in range(2):  # twice is as good as once
        mulo.multiply_outputs_(plain, roles, rescale=True)
        torch.testing.assert_close(plain(x), before)
        mulo.param_groups(plain, roles)


def test_tied_embeddings():
    """One weight, an output that is not zero; the readout divides; folding needs it untied."""
    roles = roles_of(TiedMLP)
    assert roles["tokens.weight"] == "output"
    assert "head.weight" not in roles
    model = mulo.init_(TiedMLP(64), roles)
    assert float(model.tokens.weight.detach().std()) == pytest.approx(1, rel=0.1)
    x = torch.randn(3, 64)
    torch.testing.assert_close(model.head(x), x @ model.tokens.weight.T / 64)
    torch.testing.assert_close(model.tokens.weight[:2], model.tokens(torch.arange(2)))
    (group,) = (g for g in mulo.param_groups(model, roles) if g["role"] == "output")
    assert (group["kind"], group["scale"], group["out_axis"]) == ("table", 1.0, 1)
    before, refusal = model.head(x), r"'tokens' is tied to an output layer.*untie"
    with pytest.raises(ValueError, match=refusal):
        mulo.fold_outputs_(model)
    assert torch.equal(model.head(x), before)
    with pytest.raises(ValueError, match=refusal):  # pretrained and tied
        mulo.multiply_outputs_(TiedMLP(64), roles, rescale=True)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    torch.testing.assert_close(mulo.fold_outputs_(model).head(x), before)
    assert float(model.tokens.weight.detach().std()) == pytest.approx(1, rel=0.1)


def test_the_head_may_be_defined_before_the_embedding():
    def build(w):
        model = Holder(head=nn.Linear(w, 9, bias=False), tokens=nn.Embedding(9, w, padding_idx=0))
        model.head.weight = model.tokens.weight
        return model

    model = mulo.init_(build(8), roles_of(build))
    assert roles_of(build) == {"head.weight": "output"}
    assert not model.head.weight[0].any()
    assert model.head.weight[1:].all()


@pytest.mark.parametrize("layer", [mulo.Readout, nn.Linear])
def test_the_multiplier_goes_on_once_and_off_again(layer):
    def build(w):
        return nn.Sequential(nn.Linear(3, w), layer(w, 4))

    model, roles, x = build(8), roles_of(build), torch.randn(2, 8)
    for rules, factor in ((ALL, 8), (ALL, 8), ((), 1), (("init",), 1), (ALL, 8)):
        mulo.init_(model, roles, rules=rules, zero_output=False)
        plain = nn.functional.linear(x, model[1].weight, model[1].bias)
        torch.testing.assert_close(model[1](x), plain / factor)
        torch.testing.assert_close(copy.deepcopy(model)[1](x), plain / factor)
    assert set(model.state_dict()) == set(build(8).state_dict())


@pytest.mark.parametrize("layer", [mulo.Readout, nn.Linear])
def test_the_multiplier_goes_with_the_role(layer):
    model, x = nn.Sequential(nn.Linear(3, 8), layer(8, 4)), torch.randn(2, 8)
    roles = dict.fromkeys((n for n, _ in model.named_parameters()), "input")
    for role, factor in (("output", 8), ("hidden", 1)):
        mulo.init_(model, roles | {"1.weight": role}, zero_output=False)
        plain = nn.functional.linear(x, model[1].weight, model[1].bias)
        torch.testing.assert_close(model[1](x), plain / factor)


def test_an_error_comes_before_any_change():
    def build(w):
        return nn.Sequential(
            nn.Linear(3, w), nn.Linear(w, 5), Holder(w=nn.Parameter(torch.ones(4, w)))
        )

    model = build(8)
    roles = dict.fromkeys((n for n, _ in model.named_parameters()), "input")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="no hook can divide by fan_in"):
        mulo.init_(model, roles | {"1.weight": "output", "2.w": "output"})
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert not model[1]._forward_hooks


def test_convolutional_readouts():
    def build(w):
        return nn.Sequential(nn.Conv2d(1, w, 1), nn.ConvTranspose2d(w, 2, 2, groups=2, bias=False))

    model = mulo.init_(build(8), roles_of(build), zero_output=False)
    x = torch.randn(1, 8, 3, 3)
    plain = nn.functional.conv_transpose2d(x, model[1].weight, groups=2)
    torch.testing.assert_close(model[1](x), plain / (4 * 2 * 2))  # 4 inputs a group, a 2x2 kernel


def test_a_divided_model_can_be_scripted_compiled_and_pickled():
    roles, (x, _) = roles_of(ConvNet), task(ConvNet)
    model = mulo.init_(ConvNet(8), roles, zero_output=False)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for other in (torch.jit.script(model), compiled, loaded, copy.deepcopy(model)):
        torch.testing.assert_close(other(x), expected)
    mulo.param_groups(loaded, roles)


def test_a_model_that_was_compiled_before_is_divided():
    roles, (x, _) = roles_of(MLP), task(MLP)
    model = MLP(8)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    mulo.init_(model, roles, zero_output=False)
    torch.testing.assert_close(compiled(x), model(x))


def test_a_model_pickled_by_version_0_2_0_tells_how_to_go_on():
    roles, (x, _) = roles_of(MLP), task(MLP)
    model = mulo.init_(MLP(8), roles, zero_output=False)
    expected = model(x)
    model[6]._forward_hooks.clear()
    model[6].register_forward_hook(partial(mulo.roles._divide_output, 8))
    model = pickle.loads(pickle.dumps(model))
    with pytest.raises(RuntimeError, match=r"call mulo\.multiply_outputs_\(model, roles\)"):
        model(x)
    mulo.multiply_outputs_(model, roles)
    assert torch.equal(model(x), expected)


def tied_slopes(rules):
    """Coordinate check of the tied model: {layer: slopes} for mulo_m."""
    x, y = task(TiedMLP)
    roles, gen = roles_of(TiedMLP), torch.Generator().manual_seed(0)

    def setup(width):
        model = mulo.init_(TiedMLP(width), roles, rules, generator=gen)
        opt = mulo.MuLO(mulo.param_groups(model, roles, rules), mulo.load("mulo_m"))
        return model, lambda: train(model, opt, 1, x, y)

    return coordinate_check(setup, x, [256, 1024], steps=4, repeats=3).slopes


def test_coordinate_check_of_a_tied_readout():
    """Divided, neither layer's drift depends on width; undivided, the readout's clearly does."""
    for name, slopes in tied_slopes(ALL).items():
        assert slopes.abs().max() <= 0.1, (name, slopes)
    assert tied_slopes(("init", "update"))["head"][-1] > 0.5


def pretrained(build, x, y):
    """A plain model that another optimizer has trained."""
    torch.manual_seed(0)
    model = build(16)
    opt = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(50):
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()
    return model


@pytest.mark.parametrize("family", [MLP, ConvNet, Transformer])
def test_fine_tuning(family):
    """rescale=True keeps the function, so training starts from the pretrained loss."""
    model = pretrained(family, *task(family))
    x, y = task(family, seed=1)
    start, roles = loss_of(model, x, y).item(), roles_of(family)
    with pytest.raises(ValueError, match=r"if pretrained, mulo\.multiply_outputs_\(..., resc"):
        mulo.param_groups(model, roles)
    mulo.multiply_outputs_(model, roles, rescale=True)
    assert loss_of(model, x, y).item() == pytest.approx(start, rel=1e-5)
    opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"), lr=0.2)
    assert train(model, opt, 100, x, y) < 0.7 * start


class LoRA(nn.Module):
    """A frozen linear layer and a trained one of rank 4, which starts as zero."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.layer(x) + self.lora_B(self.lora_A(x))


def with_lora(model):
    model.requires_grad_(False)
    model[2], model[4] = LoRA(model[2]), LoRA(model[4])
    return model


def test_lora():
    """A is hidden: its fan_in grows, and it is no head. The frozen weights have no state."""
    with pytest.warns(UserWarning, match="lora_A.*give the others the role 'hidden'"):
        roles = roles_of(lambda w: with_lora(MLP(w)))
    roles |= {name: "hidden" for name in roles if "lora_A" in name}
    model = with_lora(pretrained(MLP, *task(MLP)))
    x, y = task(MLP, seed=1)
    start, frozen = loss_of(model, x, y).item(), model[2].layer.weight.clone()
    mulo.multiply_outputs_(model, roles, rescale=True)
    assert loss_of(model, x, y).item() == pytest.approx(start, rel=1e-5)
    opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"))
    assert train(model, opt, 100, x, y) < 0.7 * start
    assert torch.equal(model[2].layer.weight, frozen)
    assert len(opt.state) == 4
    scales = {name: g["scale"] for g in opt.param_groups for name in g["names"]}
    assert (scales["2.lora_A.weight"], scales["2.lora_B.weight"]) == (1 / 16, 1)
