"""Roles of models of transformers and timm, against tables written by hand from μP."""

import re
import warnings

import pytest
import torch

import mulo
from mulo.roles import divisor_of, weights_of


def of_transformers(kind: str, **sizes):
    """build(width) of a model of transformers; sizes are numbers, or functions of the width."""

    def build(width):
        model = getattr(pytest.importorskip("transformers"), kind)
        chosen = {k: v(width) if callable(v) else v for k, v in sizes.items()}
        return model(model.config_class(**chosen))

    return build


def vit_of_timm(width):
    sizes = {"embed_dim": width, "num_heads": 4, "depth": 2, "img_size": 32}
    return pytest.importorskip("timm").create_model("vit_tiny_patch16_224", **sizes)


def same(width):
    return width


def times(n):
    return lambda width: n * width


TEXT = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = TEXT | {"hidden_size": same, "intermediate_size": times(4)}
GPT2 = {"vocab_size": 97, "n_positions": 32, "n_layer": 2, "n_head": 4, "n_embd": same}
LLAMA = BERT | {"num_key_value_heads": 2}
STAGES = {"hidden_sizes": lambda w: [w, 2 * w, 4 * w, 8 * w], "depths": [1, 1, 1, 1]}
RESNET18 = STAGES | {"depths": [2, 2, 2, 2], "embedding_size": same, "layer_type": "basic"}


def experts(width):
    """Mixtral: the experts of a layer are one parameter, (expert, out, in)."""
    sizes = LLAMA | {"num_local_experts": 4}
    model = of_transformers("MixtralForCausalLM", **sizes)(width)
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
        of_transformers("GPT2LMHeadModel", **GPT2),
        GPT2_LAYER | {"transformer.wte": "output"},  # tied to the head
    ),
    "gpt2, untied": (
        of_transformers("GPT2LMHeadModel", tie_word_embeddings=False, **GPT2),
        GPT2_LAYER | {"transformer.wte": "input", "lm_head": "output 96"},
    ),
    "llama": (
        of_transformers("LlamaForCausalLM", **LLAMA),
        ATTENTION
        | {f"*.mlp.{x}_proj": "hidden 96" for x in ("gate", "up")}
        | {"*.mlp.down_proj": "hidden 384"}
        | {"model.embed_tokens": "input", "lm_head": "output 96"},
    ),
    "bert, masked": (
        of_transformers("BertForMaskedLM", **BERT),
        BERT_LAYER
        | {"predictions.transform.dense": "hidden 96"}
        | {"bert.embeddings.word_embeddings": "output"},
    ),
    "t5": (
        of_transformers(
            "T5ForConditionalGeneration", vocab_size=97, num_layers=2, num_heads=4,
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
    "vit": (vit_of_timm, VIT_LAYER | {"head": "output 96"}),
    "convnext": (
        of_transformers("ConvNextForImageClassification", **STAGES),
        {"convnext.embeddings.patch_embeddings": "input 48", "layers.*.dwconv": "input 49"}
        | {"layers.*.pwconv1": "hidden", "layers.*.pwconv2": "hidden"}
        | {"*.downsampling_layer.*": "hidden", "classifier": "output 768"},
    ),
    "resnet18": (
        of_transformers("ResNetForImageClassification", **RESNET18),
        {"embedder.embedder.convolution": "input 147", "layer.*.convolution": "hidden"}
        | {"*.shortcut.convolution": "hidden", "classifier.*": "output 768"},
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
        key = re.sub(r"\b\d+\b", "*", ".".join(parts))
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
    build = of_transformers("LlamaForCausalLM", **TEXT, hidden_size=same)
    message = r"mlp\.gate_proj\.weight'.*\.\.\. \(5\).*let its size grow"
    with pytest.warns(UserWarning, match=message):
        mulo.infer_roles(build, 64)
