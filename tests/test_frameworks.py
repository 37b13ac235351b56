"""Other people's training loops give what a plain one gives: AMP, torch.compile, Lightning,
accelerate, Hugging Face's Trainer, timm. What is not installed is skipped."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from user_models import MLP, loss_of, make, small, task, train, values, velo

import mulo

STEPS = 3
KINDS = ["small_fc", "velo"]


def plain(kind, parts=1):
    """Parameters after a plain loop, and a net, an optimizer and batches to train likewise.

    VeLO compares losses, so their rounding matters: the batch is in as many parts as theirs.
    """
    lo = velo() if kind == "velo" else small(0.1)
    batches = list(zip(*(x.chunk(parts) for x in task(MLP)), strict=True))
    net, opt = make(lo, num_steps=STEPS)
    for _ in range(STEPS):
        opt.zero_grad()
        loss = sum(loss_of(net, *batch) / parts for batch in batches)
        loss.backward()
        opt.step(loss=loss)
    return values(net), *make(lo, num_steps=STEPS), batches


def assert_same(net, expected):
    assert (expected - values(make()[0])).abs().max() > 1e-3  # it has moved
    torch.testing.assert_close(values(net), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_grad_scaler(kind):
    """Scaled losses train as unscaled ones; a step with infinite gradients is skipped whole."""
    expected, net, opt, [batch] = plain(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for t in range(STEPS + 1):
        opt.zero_grad()
        loss = loss_of(net, *batch)
        scaler.scale(loss).backward()
        if t == STEPS:
            net[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scaler.step(opt, loss=loss)
        scaler.update()
    assert_same(net, expected)
    assert opt.param_groups[0]["step"] == STEPS
    assert opt.nonfinite == 0


def test_autocast():
    """Gradients of a model that computes in bfloat16 train its float32 parameters."""
    (net, opt), (x, y) = make(mulo.load("mulo_m")), task(MLP)
    first = loss_of(net, x, y)
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(net, x, y)
        loss.backward()
        opt.step()
    assert loss_of(net, x, y) < 0.8 * first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", ["model", "step", "loop"])
def test_compile(compiled, kind):
    """A compiled model, with a batch in two halves; a compiled opt.step; a compiled loop body."""
    expected, net, opt, batches = plain(kind, parts=2)
    model = torch.compile(net, backend="aot_eager") if compiled == "model" else net
    step = torch.compile(opt.step, backend="aot_eager") if compiled == "step" else opt.step

    def once():
        opt.zero_grad()
        total = 0.0
        for batch in batches:
            loss = loss_of(model, *batch) / 2
            loss.backward()
            total = total + loss.detach()
        step(loss=total)

    once = torch.compile(once, backend="aot_eager") if compiled == "loop" else once
    for _ in range(STEPS):
        once()
    torch._dynamo.reset()
    assert_same(net, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_lightning(kind, tmp_path):
    """It passes a closure, so VeLO sees the loss; its checkpoint continues the run."""
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    expected, net, opt, [(x, y)] = plain(kind)

    class Module(lightning.LightningModule):
        def __init__(self, net, opt):
            super().__init__()
            self.net, self.opt = net, opt

        def training_step(self, batch, _):
            return loss_of(self.net, *batch)

        def configure_optimizers(self):
            return self.opt

    def fit(net, opt, steps, checkpoint=None):
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        data = DataLoader(TensorDataset(x, y), batch_size=len(x))
        trainer.fit(Module(net, opt), data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "run.ckpt")

    lo = opt.lo
    fit(net, opt, STEPS - 1)
    net, opt = make(lo, num_steps=STEPS, seed=1)
    fit(net, opt, STEPS, tmp_path / "run.ckpt")
    assert_same(net, expected)
    assert opt.param_groups[0]["step"] == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate(kind):
    """Its optimizer takes a closure; in one that returns the loss, VeLO sees it."""
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    expected, net, opt, batches = plain(kind, parts=2)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, opt = accelerator.prepare(net, opt)
    for _ in range(STEPS):
        losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                losses.append(loss_of(model, *batch))
                accelerator.backward(losses[-1])
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
                opt.step(lambda losses=losses: sum(losses) / 2)
                opt.zero_grad()
    assert_same(net, expected)


def test_huggingface_trainer(tmp_path):
    """The Trainer passes no loss, so VeLO is refused. `learning_rate` is not used."""
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    pytest.importorskip("accelerate", reason="pip install accelerate")
    expected, net, opt, [(x, y)] = plain("small_fc")

    class Model(nn.Sequential):
        def forward(self, x, labels):
            return {"loss": loss_of(self[0], x, labels)}

    def fit(net, opt):
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=len(x), max_grad_norm=0.0,
            lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
        options = {"args": args, "train_dataset": data, "optimizers": (opt, None)}
        transformers.Trainer(Model(net), **options).train()

    fit(net, opt)
    assert_same(net, expected)
    with pytest.raises(RuntimeError, match="VeLO needs the loss"):
        fit(*make(velo(), num_steps=STEPS))


def test_timm():
    """A ViT, timm's schedule with warm-up and its average of the weights."""
    timm = pytest.importorskip("timm", reason="pip install timm")
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    def build(width):
        size = {"img_size": 16, "patch_size": 8, "embed_dim": width, "num_classes": 5}
        return timm.models.VisionTransformer(**size, depth=2, num_heads=4)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of roles that are not this test's matter
        roles = mulo.infer_roles(build, 16)
    net = mulo.init_(build(16), roles)
    opt = mulo.MuLO(mulo.param_groups(net, roles), mulo.load("mulo_m"))
    average, schedule = ModelEmaV3(net, decay=0.5), CosineLRScheduler(opt, 20, warmup_t=5)
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 5
    scales = [group["scale"] for group in opt.param_groups]
    losses, rates = [], []
    for t in range(20):
        schedule.step(t)
        rates.append(opt.param_groups[0]["lr"])
        losses.append(train(net, opt, 1, x, y))
        average.update(net)
    assert losses[-1] < 0.9 * losses[0]
    assert loss_of(average.module, x, y) < 0.9 * losses[0]
    assert min(rates) == 0
    assert max(rates) > 0.8
    assert [group["scale"] for group in opt.param_groups] == scales
