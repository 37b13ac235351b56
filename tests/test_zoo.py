"""Roles of models of transformers, timm and torchvision, against tables written by hand from μP."""

import re
import warnings

import pytest
import torch
from torch import nn

import mulo
from mulo.roles import divisor_of, weights_of


def of_transformers(kind: str, config: str, **sizes):
    """build(width) of a model of transformers; sizes are numbers, or functions of the width."""

    def build(width):
        transformers = pytest.importorskip("transformers")
        chosen = {k: v(width) if callable(v) else v for k, v in sizes.items()}
        return getattr(transformers, kind)(getattr(transformers, config)(**chosen))

    return build


def of_timm(name: str, **sizes):
    def build(width):
        timm = pytest.importorskip("timm")
        chosen = {k: v(width) if callable(v) else v for k, v in sizes.items()}
        return timm.create_model(name, **chosen)

    return build


def resnet18(width):
    """torchvision's ResNet with a width: its constructor has none for the trunk."""
    models = pytest.importorskip("torchvision").models

    class ResNet(models.ResNet):
        def __init__(self):
            nn.Module.__init__(self)
            self._norm_layer, self.inplanes, self.dilation = nn.BatchNorm2d, width, 1
            self.groups, self.base_width = 1, 64
            self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
            for k in range(4):
                block = models.resnet.BasicBlock
                layer = self._make_layer(block, width * 2**k, 2, stride=1 + (k > 0))
                setattr(self, f"layer{k + 1}", layer)
            self.fc = nn.Linear(8 * width, 1000)

    return ResNet()


def same(width):
    return width


def times(n):
    return lambda width: n * width


TEXT = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = TEXT | {"hidden_size": same, "intermediate_size": times(4)}
GPT2 = {"vocab_size": 97, "n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": same}
LLAMA = BERT | {"num_key_value_heads": 2}
VIT = {"embed_dim": same, "num_heads": 4, "depth": 2, "img_size": 32}
STAGES = {"dims": lambda w: (w, 2 * w, 4 * w, 8 * w), "depths": (1, 1, 1, 1)}
SWIN = {"embed_dim": same, "depths": (1, 1, 1, 1), "num_heads": (2, 4, 8, 16)}


def experts(width):
    """Mixtral: the experts of a layer are one parameter, (expert, out, in)."""
    sizes = LLAMA | {"num_local_experts": 4}
    model = of_transformers("MixtralForCausalLM", "MixtralConfig", **sizes)(width)
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.out_axis = {"gate_up_proj": -2, "down_proj": -2}
    return model


ATTENTION = {f"*.self_attn.{x}_proj": "hidden 96" for x in "qkvo"}
BERT_LAYER = {f"attention.self.{x}": "hidden 96" for x in ("query", "key", "value")}
BERT_LAYER |= {"attention.output.dense": "hidden 96", "*.output.dense": "hidden 384"}
BERT_LAYER |= {"*.intermediate.dense": "hidden 96", "bert.embeddings.position_embeddings": "input"}
BERT_LAYER |= {"bert.embeddings.token_type_embeddings": "input"}
GPT2_LAYER = {"*.attn.c_attn": "hidden 96", "*.attn.c_proj": "hidden 96"}
GPT2_LAYER |= {"*.mlp.c_fc": "hidden 96", "*.mlp.c_proj": "hidden 384", "transformer.wpe": "input"}
VIT_LAYER = {"*.attn.qkv": "hidden 96", "*.attn.proj": "hidden 96"}
VIT_LAYER |= {"*.mlp.fc1": "hidden 96", "*.mlp.fc2": "hidden 384", "patch_embed.proj": "input 768"}
VIT_LAYER |= {"cls_token": "input", "pos_embed": "input"}

# The role of each matrix at width 96, and its fan_in where it is the same in all layers. Keys are
# the last three parts of the module's name. Norms and biases are inputs in every model.
ZOO = {
    "gpt2": (
        of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT2),
        GPT2_LAYER | {"transformer.wte": "output"},  # tied to the head
    ),
    "gpt2, untied": (
        of_transformers("GPT2LMHeadModel", "GPT2Config", tie_word_embeddings=False, **GPT2),
        GPT2_LAYER | {"transformer.wte": "input", "lm_head": "output 96"},
    ),
    "llama": (
        of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        ATTENTION
        | {f"*.mlp.{x}_proj": "hidden 96" for x in ("gate", "up")}
        | {"*.mlp.down_proj": "hidden 384"}
        | {"model.embed_tokens": "input", "lm_head": "output 96"},
    ),
    "bert, masked": (
        of_transformers("BertForMaskedLM", "BertConfig", **BERT),
        BERT_LAYER
        | {"predictions.transform.dense": "hidden 96"}
        | {"bert.embeddings.word_embeddings": "output"},
    ),
    "t5": (
        of_transformers(
            "T5ForConditionalGeneration", "T5Config", vocab_size=97, num_layers=2, num_heads=4,
            d_model=same, d_ff=times(4), d_kv=lambda w: w // 4,
        ),
        {f"*.SelfAttention.{x}": "hidden 96" for x in "qkvo"}
        | {f"*.EncDecAttention.{x}": "hidden 96" for x in "qkvo"}
        | {"*.DenseReluDense.wi": "hidden 96", "*.DenseReluDense.wo": "hidden 384"}
        | {"*.SelfAttention.relative_attention_bias": "input", "shared": "output"},
    ),
    "mixtral": (
        experts,
        ATTENTION
        | {"mlp.experts.gate_up_proj": "hidden 96", "mlp.experts.down_proj": "hidden 384"}
        | {"*.mlp.gate": "input", "model.embed_tokens": "input", "lm_head": "output 96"},
    ),
    "vit": (
        of_timm("vit_tiny_patch16_224", **VIT), VIT_LAYER | {"head": "output 96"},
    ),
    "convnext": (
        of_timm("convnext_tiny", **STAGES),
        {"stem.*": "input 48", "blocks.*.conv_dw": "input 49", "*.downsample.*": "hidden"}
        | {"*.mlp.fc1": "hidden", "*.mlp.fc2": "hidden", "head.fc": "output 768"},
    ),
    "swin": (
        of_timm("swin_tiny_patch4_window7_224", **SWIN),
        {f"*.attn.{x}": "hidden" for x in ("qkv", "proj")}
        | {f"*.mlp.{x}": "hidden" for x in ("fc1", "fc2")}
        | {"*.attn.relative_position_bias_table": "input", "patch_embed.proj": "input 48"}
        | {"*.downsample.reduction": "hidden", "head.fc": "output 768"},
    ),
    "resnet18": (
        resnet18,
        {f"layer*.*.conv{k}": "hidden" for k in (1, 2)}
        | {"conv1": "input 147", "*.downsample.*": "hidden", "fc": "output 768"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_roles_are_those_of_the_table(name):
    build, table = ZOO[name]
    action = "ignore" if name == "mixtral" else "error"  # its router looks like a head
    with warnings.catch_warnings(action=action, category=UserWarning):
        roles = mulo.infer_roles(build, 96)
    with torch.device("meta"):
        model = build(96)
    seen = set()
    for w in weights_of(model):
        if w.kind == "vector":
            assert roles[w.name] == "input", w.name
            continue
        parts = w.name.removesuffix(".weight").split(".")[-3:]
        key = re.sub(r"\b\d+\b|(?<=layer)\d", "*", ".".join(parts))
        role, *fan_in = table[key].split()
        assert roles[w.name] == role, w.name
        assert not fan_in or w.fan_in == int(fan_in[0]), (w.name, w.fan_in)
        seen.add(key)
    assert seen == set(table)


def test_gpt2_trains_and_its_files_load_elsewhere(tmp_path):
    """Tied: the head divides. Untied: the folded model is a plain one for save_pretrained."""
    x = torch.arange(24).view(2, 12) % 7
    for name in ("gpt2", "gpt2, untied"):
        build, roles = ZOO[name][0], mulo.infer_roles(ZOO[name][0], 32)
        model = mulo.init_(build(32), roles).eval()
        assert divisor_of(model.lm_head) == 32
        opt = mulo.MuLO(mulo.param_groups(model, roles), mulo.load("mulo_m"))
        losses = []
        for _ in range(60):
            loss = model(x, labels=x).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], name
    logits = model(x).logits
    mulo.fold_outputs_(model).save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(x).logits, logits)


def test_a_build_that_varies_a_part_warns():
    build = of_transformers("LlamaForCausalLM", "LlamaConfig", **TEXT, hidden_size=same)
    with pytest.warns(
        UserWarning, match=r"mlp\.gate_proj\.weight'.*\.\.\. \(5\).*every inner size"
    ):
        mulo.infer_roles(build, 64)
