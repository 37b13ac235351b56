"""Round trips, importers, and everything that can be wrong with a file."""

import os
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
from golden_files import Golden
from hypothesis import given, settings
from hypothesis import strategies as st

import mulo
from mulo import LOConfig, checkpoints


@pytest.fixture
def small_fc():
    return mulo.SmallFC(LOConfig(hidden_size=4, lam1=0.01, t_max=500.0))


def test_what_a_file_holds(small_fc, tmp_path):
    mulo.save(small_fc, tmp_path / "lo.pt", seed=3, command="python metatrain.py")
    assert os.listdir(tmp_path) == ["lo.pt"]
    content = torch.load(tmp_path / "lo.pt", weights_only=True)
    assert content["version"] == 1
    assert content["about"] == {"seed": 3, "command": "python metatrain.py"}
    again = mulo.load(tmp_path / "lo.pt", t_max=None)  # a changed config
    assert (again.config.t_max, again.config.lam1) == (None, 0.01)
    assert again.about == content["about"]
    assert torch.equal(again.w0, small_fc.w0)
    with pytest.raises(TypeError, match="lambda1"):
        mulo.load(tmp_path / "lo.pt", lambda1=0.1)
    mulo.save(small_fc.bfloat16(), tmp_path / "lo.pt")  # saved as float32
    again = mulo.load(tmp_path / "lo.pt")
    torch.testing.assert_close(again.state_dict(), small_fc.float().state_dict(), rtol=0, atol=0)


NUMBERS = st.floats(0, 1e9, allow_subnormal=False)
CONFIGS = st.builds(
    LOConfig,
    net=st.sampled_from(["small_fc", "velo"]),
    hidden_size=st.integers(1, 9),
    hidden_layers=st.integers(1, 4),
    lam1=NUMBERS,
    lam2=NUMBERS,
    spec=st.sampled_from(["reference", "paper"]),
    eps=st.sampled_from(["reference", "relative", "fan_in"]),
    eps_rms=NUMBERS,
    t_max=st.none() | NUMBERS,
    anneal=NUMBERS,
    lstm_hidden=st.integers(1, 9),
    param_inits=st.integers(1, 5),
    param_scale_mult=st.booleans(),
    use_bugged_loss_features=st.booleans(),
)
ABOUT = st.dictionaries(st.sampled_from("abc"), st.none() | st.integers() | NUMBERS | st.text())


@settings(max_examples=10)
@given(config=CONFIGS, about=ABOUT, seed=st.integers(0, 99))
def test_round_trip_of_any_config(tmp_path_factory, config, about, seed):
    lo = {"small_fc": mulo.SmallFC, "velo": mulo.VeLO}[config.net](config)
    for n, w in enumerate(lo.parameters()):
        w.normal_(generator=torch.Generator().manual_seed(seed + n))
    path = tmp_path_factory.getbasetemp() / "any.pt"
    mulo.save(lo, path, **about)
    again = mulo.load(path)
    assert (type(again), again.config, again.about) == (type(lo), config, about)
    torch.testing.assert_close(again.state_dict(), lo.state_dict(), rtol=0, atol=0)
    assert checkpoints.digest(again) == checkpoints.digest(lo)
    next(again.parameters()).view(-1)[0] += 1
    assert checkpoints.digest(again) != checkpoints.digest(lo)


def test_a_failed_write_leaves_the_old_file(small_fc, tmp_path, monkeypatch):
    mulo.save(small_fc, tmp_path / "lo.pt")
    before = (tmp_path / "lo.pt").read_bytes()

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        mulo.save(small_fc, tmp_path / "lo.pt")
    assert (tmp_path / "lo.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["lo.pt"]


def test_about_takes_plain_values_only(small_fc, tmp_path):
    for value in (tmp_path, lambda: 0, np.float64(0.5)):
        with pytest.raises(TypeError, match="give plain numbers and strings"):
            mulo.save(small_fc, tmp_path / "lo.pt", where=value)
    assert not os.listdir(tmp_path)


def test_shipped_names(small_fc, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SHIPPED", tmp_path)
    mulo.save(small_fc, tmp_path / "mine.pt")
    assert mulo.load("mine").config == small_fc.config
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()  # a folder of this name hides nothing
    assert mulo.load("mine").config == small_fc.config
    for name in ("yours", None):
        with pytest.raises(FileNotFoundError, match=rf"no file '{name}'.*\(mine\)"):
            mulo.load(name)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil",))


def test_bad_files(small_fc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mulo.save(small_fc, "lo.pt")
    good, whole = torch.load("lo.pt", weights_only=True), (tmp_path / "lo.pt").read_bytes()
    config, weights = good["config"], good["weights"]

    def refused(message, content):
        """A file of these bytes, or with this object in it."""
        if isinstance(content, bytes):
            (tmp_path / "bad.pt").write_bytes(content)
        else:
            torch.save(content, "bad.pt")
        with pytest.raises(ValueError, match=rf"^bad\.pt .*{message}") as error:
            mulo.load("bad.pt")
        assert "\n" not in str(error.value)

    def forged(**parts):
        """A file with a right checksum."""
        parts = {"config": config, "weights": weights} | parts
        return good | parts | {"sha256": checkpoints._sha256(parts["config"], parts["weights"])}

    foreign, damaged = r"was not written by mulo\.save", "is damaged or of another release"
    refused(foreign, good | {"version": 99})
    refused(foreign, {"w0": torch.zeros(3)})
    refused("holds a list, no weights", [1, 2])
    for size in (0, 10, len(whole) // 2, len(whole) - 30):
        refused("is damaged", whole[:size])
    refused("is damaged", b"<html>")
    refused("was not read: .* may run code", good | {"about": Evil()})
    refused("was not read: .* may run code", pickle.dumps(Evil()))
    assert not os.path.exists("evil")
    flipped = bytearray(whole)
    flipped[whole.index(small_fc.w0.numpy().tobytes()) + 9] ^= 1
    refused("(its checksum is wrong|is damaged)", bytes(flipped))
    mismatch = r"size mismatch for w0: .*\[39, 5\].*\[39, 4\]"
    refused(mismatch, forged(weights=weights | {"w0": torch.zeros(39, 5)}))
    refused(damaged, forged(weights=weights | {"w0": torch.zeros(38)}))
    other_features = weights | {"w0": torch.zeros(38, 4)}
    refused("meta-trained with 38 features, this code has 39", forged(weights=other_features))
    less = {name: w for name, w in weights.items() if name != "b1"}
    refused(r"Missing key\(s\) in state_dict: \"b1\"", forged(weights=less))
    refused(f"{damaged}.*colour", forged(config=config | {"colour": 1}))
    refused(damaged, good | {"config": [1]})
    refused(damaged, good | {"weights": [1]})
    huge = {10**9: "do not fit small_fc: .* size mismatch for w0", 10**18: damaged, 10**30: damaged}
    for size, message in huge.items():
        refused(message, forged(config=config | {"hidden_size": size}))
    refused(f"{damaged}.*multipliers", good | {"config": config | {"multipliers": True}})
    lo = mulo.VeLO(LOConfig(net="velo", hidden_size=4, lstm_hidden=8, param_inits=3))
    lo.bank_w0 = torch.nn.Parameter(torch.zeros(3, 31, 4), requires_grad=False)
    mulo.save(lo, "velo.pt")
    refused("with 31 features, this code has 30", (tmp_path / "velo.pt").read_bytes())


def test_from_reference(velo_4000):
    golden = Golden("small_fc_h32_sp")
    arrays = {k.removeprefix("meta/"): v for k, v in golden.z.items() if k.startswith("meta/")}
    assert mulo.from_reference(arrays, lam1=0.5).config == LOConfig(hidden_size=32, lam1=0.5)
    with pytest.raises(ValueError, match="no 'w0' or 'ff/w0' among"):
        mulo.from_reference({f"meta/{k}": v for k, v in arrays.items()})
    with pytest.raises(ValueError, match=r"Missing.*rms_decays"):
        mulo.from_reference({k: v for k, v in arrays.items() if k != "rms_decays"})
    with pytest.raises(ValueError, match="VeLO's array 'ff/b0' is missing"):
        mulo.from_reference({k: v for k, v in velo_4000["plain"].items() if k != "ff/b0"})
    plain, released = (mulo.from_reference(velo_4000[k]) for k in ("plain", "released"))
    sizes = plain.config.lstm_hidden, plain.config.param_inits, plain.config.hidden_size
    assert sizes == (512, 256, 4)
    torch.testing.assert_close(plain.state_dict(), released.state_dict(), rtol=0, atol=0)


def test_from_pylo(tmp_path):
    """PyLO's MetaMLP stores torch Linear layers; its decays are given beside the file."""
    golden = Golden("small_fc_h32_sp")
    expected, state = golden.lo(), {}
    weights = expected.state_dict()
    for k, name in enumerate(("input", "linear_0", "output")):
        state[f"network.{name}.weight"] = weights[f"w{k}"].mT.contiguous()
        state[f"network.{name}.bias"] = weights[f"b{k}"]
    safetensors.torch.save_file(state, tmp_path / "lo.safetensors")
    torch.save(state, tmp_path / "lo.pt")
    decays = {k: w.tolist() for k, w in weights.items() if "decays" in k}
    for file in ("lo.safetensors", "lo.pt"):
        lo = mulo.from_pylo(tmp_path / file, **decays, lam1=expected.config.lam1)
        torch.testing.assert_close(lo.state_dict(), weights)
        assert lo.config == LOConfig(hidden_size=32, lam1=expected.config.lam1)
    assert not mulo.from_pylo(tmp_path / "lo.pt").momentum_decays.any()
    torch.save({"layer.weight": torch.zeros(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"no 'network\.input\.weight'.*not PyLO's"):
        mulo.from_pylo(tmp_path / "other.pt")
