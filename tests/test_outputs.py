"""The division of outputs by fan_in: set, checked, folded; tied readouts and pretrained weights."""

import copy
import io

import pytest
import torch
from torch import nn
from user_models import MLP, ConvNet, TiedMLP, Transformer, loss_of, task, train

import mulo
from mulo.roles import ALL


def roles_of(build):
    return mulo.infer_roles(build, 16)


def test_param_groups_checks_the_divisions():
    """A new head, a forgotten init_ and other roles or rules are refused."""
    roles = roles_of(MLP)
    model = mulo.init_(MLP(8), roles)
    hidden = roles | {"4.weight": "output"}
    for other, rules in ((hidden, ALL), (roles, ()), (roles | {"6.weight": "hidden"}, ALL)):
        with pytest.raises(ValueError, match=r"layer '[46]' is divided by \d, not by \d"):
            mulo.param_groups(model, other, rules)
    model[6] = nn.Linear(8, 5)
    with pytest.raises(ValueError, match=r"'6' is divided by 1, not by 8: call mulo\.multiply_"):
        mulo.param_groups(model, roles)
    mulo.param_groups(model, roles, ("init", "update"))  # whoever divides by hand
    model[6] = mulo.Readout(8, 5)
    mulo.param_groups(model, roles)


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


def test_other_readouts():
    """Layers that share an output weight, and transposed convolutions, are divided too."""

    def shared(w):
        model = nn.Sequential(nn.Linear(3, w), nn.Linear(w, 2), nn.Linear(w, 2))
        model[2].weight = model[1].weight
        model.bias = model[2].bias  # another name, as in BERT
        return model

    def conv(w):
        return nn.Sequential(nn.Conv2d(1, w, 1), nn.ConvTranspose2d(w, 2, 2, groups=2, bias=False))

    model, x = mulo.init_(shared(8), roles_of(shared), zero_output=False), torch.randn(4, 8)
    expected = (x @ model[1].weight.T + model[2].bias) / 8
    torch.testing.assert_close(model[2](x), expected)
    torch.testing.assert_close(mulo.fold_outputs_(model)[2](x), expected)
    model, x = mulo.init_(conv(8), roles_of(conv), zero_output=False), torch.randn(1, 8, 3, 3)
    plain = nn.functional.conv_transpose2d(x, model[1].weight, groups=2)
    torch.testing.assert_close(model[1](x), plain / 16)  # 4 inputs per group, a 2x2 kernel


def test_a_divided_model_can_be_scripted_compiled_and_pickled():
    """Also if it was compiled before it is divided."""
    roles, (x, _) = roles_of(ConvNet), task(ConvNet)
    model = ConvNet(8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(x)
    expected = mulo.init_(model, roles, zero_output=False)(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    for other in (torch.jit.script(model), compiled, loaded):
        torch.testing.assert_close(other(x), expected)
    mulo.param_groups(loaded, roles)


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


@pytest.mark.parametrize("lora", [False, True])
def test_fine_tuning(lora):
    """rescale=True keeps the function, so training starts from the pretrained loss. LoRA's A is
    hidden: its fan_in grows, and it is no head. The frozen weights have no state."""
    torch.manual_seed(0)
    roles, model = roles_of(MLP), MLP(16)
    train(model, torch.optim.AdamW(model.parameters(), 0.01), 50, *task(MLP))
    if lora:
        with pytest.warns(UserWarning, match="lora_A.*make it 'hidden'"):
            roles = roles_of(lambda w: with_lora(MLP(w)))
        roles |= {name: "hidden" for name in roles if "lora_A" in name}
        with_lora(model)
    x, y = task(MLP, seed=1)
    start, before = loss_of(model, x, y).item(), copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"rescale=True if it was trained otherwise"):
        mulo.param_groups(model, roles)
    mulo.multiply_outputs_(model, roles, rescale=True)
    assert loss_of(model, x, y).item() == pytest.approx(start, rel=1e-5)
    lr = 1.0 if lora else 0.2
    opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"), lr=lr)
    assert train(model, opt, 100, x, y) < 0.7 * start
    if lora:
        assert torch.equal(model[2].layer.weight, before[2].layer.weight)
        assert len(opt.state) == 4
        scales = {name: g["scale"] for g in opt.param_groups for name in g["names"]}
        assert "2.layer.weight" in scales  # it could be unfrozen
        assert (scales["2.lora_A.weight"], scales["2.lora_B.weight"]) == (1 / 16, 1)
