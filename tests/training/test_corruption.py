"""Wrong tokens are fed, true ones are asked for; rate 0 changes nothing."""

import json
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diagd.families.checkpoints import load_model
from diagd.models.attention import attend
from diagd.training.mixture import Corruption, MixtureLoss, ViewLoss
from diagd.training.sequences import draw_batch
from diagd.training.train import pretrain
from tests.training.runs import assert_same_run, log_of, run_killed
from tests.worlds import SHARD_CODES, clips_of, write_shard_model

KINDS = ("uniform", "samples")
CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path):
    return load_model(write_shard_model(tmp_path / "model"))


def loss_of(options, model, strategy: str = "k=1") -> ViewLoss:
    run = options(strategy=(strategy,), context_frames=1)
    loss = next(iter(MixtureLoss(run, model.config, CPU).losses.values()))
    assert isinstance(loss, ViewLoss)
    return loss


def fed_by(corruption: Corruption, loss: ViewLoss, model, tokens: Tensor, step: int) -> Tensor:
    before = tokens.clone()
    fed = corruption(model, tokens, step, loss)
    assert torch.equal(tokens, before)
    return fed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["raster", "k=1", "k=2,d=1"])
def test_actions_are_never_wrong_and_targets_stay_true(kind, strategy, model, options):
    mixture = options(
        strategy=(strategy,), context_frames=1, corrupt=0.9, corrupt_with=kind, seed=3
    )
    losses = MixtureLoss(mixture, model.config, CPU)
    wrong, loss, met = losses.corruption, loss_of(options, model, strategy), 0
    assert wrong is not None
    assert wrong == Corruption(0.9, kind, 3, SHARD_CODES)
    tokens, view = draw_batch(clips_of(), 3, 4, 0), loss.view
    actions = tokens >= SHARD_CODES
    for step in range(5):
        fed = fed_by(wrong, loss, model, tokens, step)
        assert torch.equal(fed[actions], tokens[actions])
        assert ((fed < SHARD_CODES) == ~actions).all()
        struck = wrong.draw(step, *tokens.shape)[0] & ~actions
        assert kind == "samples" or torch.equal(fed != tokens, struck)
        met += (fed != tokens).sum().item()
        with torch.no_grad():
            seen = partial(attend, visible=view.visible())
            logits = model(
                fed[:, view.sources],
                positions=view.positions,
                attends=(seen, seen),
                logits_to_keep=view.readers,
            )
            expected = functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, view.targets[view.readers]].flatten()
            )
            assert torch.equal(losses(model, tokens, step), expected)
    assert met > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_of_zero_changes_nothing_bit_for_bit(kind, model, options):
    tokens = draw_batch(clips_of(), 3, 4, 0)
    run = options(strategy=("k=1",), context_frames=1)
    plain, none = (MixtureLoss(run, model.config, CPU) for _ in range(2))
    assert plain.corruption is None
    none.corruption = Corruption(0.0, kind, 0, SHARD_CODES)
    for step in range(3):
        gradients = []
        for losses in (plain, none):
            model.zero_grad()
            loss = losses(model, tokens, step)
            loss.backward()
            gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        assert all(map(torch.equal, *gradients))


def test_a_run_of_rate_zero_is_the_run_that_knows_of_none(options):
    run = options(corrupt=0.0)
    assert not any("corrupt" in name for name in run.purpose())
    pretrain(run)
    pretrain(options("other"))
    assert_same_run(run.out, options("other").out)
    pretrain(options("wrong", corrupt=0.5))
    assert log_of(options("wrong").out) != log_of(run.out)


def test_the_share_is_drawn_from_zero_to_what_was_asked(model, options):
    corruption = Corruption(0.4, "uniform", 0, SHARD_CODES)
    tokens, loss = draw_batch(clips_of(), 6, 64, 0), loss_of(options, model)
    visual = tokens < SHARD_CODES
    shares, met = [], set()
    for step in range(200):
        fed = fed_by(corruption, loss, model, tokens, step)
        wrong = fed != tokens
        shares.append((wrong & visual).sum().item() / visual.sum().item())
        met |= set(fed[wrong].tolist())
    assert met == set(range(SHARD_CODES))
    ordered = torch.tensor(shares).sort().values
    uniform = torch.linspace(0, 0.4, 200)
    assert (ordered - uniform).abs().max() < 0.06  # Kolmogorov-Smirnov over 200 draws, 1% level
    assert torch.tensor(shares).mean().item() == pytest.approx(0.2, abs=0.03)


def test_samples_are_drawn_from_what_the_model_says_of_the_place(model, options):
    loss, size = loss_of(options, model), 512
    tokens = draw_batch(clips_of(), 3, 1, 0).expand(size, -1)
    corruption = Corruption(0.999, "samples", 0, SHARD_CODES)
    with torch.no_grad():
        chances = loss.logits(model, tokens[:1])[0, :, :SHARD_CODES].softmax(-1)
    targets = loss.view.targets[loss.view.readers]
    counts, drawn = torch.zeros(len(targets), SHARD_CODES), torch.zeros(len(targets), 1)
    for step in range(10):
        struck = corruption.draw(step, *tokens.shape)[0][:, targets]
        fed = fed_by(corruption, loss, model, tokens, step)
        assert torch.equal(fed[:, :6], tokens[:, :6])  # the first frame is given, not learnt
        one_hot = functional.one_hot(fed[:, targets], SHARD_CODES)
        counts += (one_hot * struck[..., None]).sum(0)
        drawn += struck.sum(0)[:, None]
    deviation = (drawn * chances * (1 - chances)).sqrt()
    assert ((counts - drawn * chances).abs() < 4.5 * deviation + 1).all()


def test_what_is_wrong_does_not_depend_on_the_number_of_processes(model, options):
    tokens, loss = draw_batch(clips_of(), 3, 6, 0), loss_of(options, model)
    for kind in KINDS:
        whole = fed_by(Corruption(0.8, kind, 1, SHARD_CODES), loss, model, tokens, 7)
        parts = [
            fed_by(Corruption(0.8, kind, 1, SHARD_CODES, process), loss, model, part, 7)
            for process, part in enumerate(tokens.split(2))
        ]
        assert torch.equal(torch.cat(parts), whole)
        other = fed_by(Corruption(0.8, kind, 2, SHARD_CODES), loss, model, tokens, 7)
        assert not torch.equal(other, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_sampling_takes_no_gradient_away(kind, model, options):
    """Autocast keeps the weights it has cast, those cast without a gradient too."""
    tokens, loss = draw_batch(clips_of(), 3, 4, 0), loss_of(options, model)
    corruption = Corruption(0.9, kind, 0, SHARD_CODES)
    with torch.autocast("cpu", torch.bfloat16):
        known = corruption(model, tokens, 1, loss)
    gradients = []
    for sampled in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            fed = corruption(model, tokens, 1, loss) if sampled else known
            loss(model, tokens, fed).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_goes_on_with_the_same_errors(kind, options):
    wrong = {"strategy": ("raster k=1",), "corrupt": 0.5, "corrupt_with": kind}
    whole, killed = options("whole", **wrong), options("killed", **wrong, save_minutes=0.0)
    pretrain(whole)
    run_killed(pretrain, killed, 7)
    pretrain(killed)
    assert_same_run(killed.out, whole.out)
    told = json.loads((whole.out / "train.json").read_text())
    assert (told["corrupt"], told["corrupt_with"]) == (0.5, kind)
    with pytest.raises(ValueError, match="holds a run of another model, tokenizer or schedule"):
        pretrain(options("whole"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corrupt": 1.0}, r"corrupt must be in \[0, 1\), got 1.0"),
        ({"corrupt": -0.1}, r"corrupt must be in \[0, 1\), got -0.1"),
        ({"corrupt": float("nan")}, r"corrupt must be in \[0, 1\), got nan"),
        (
            {"corrupt": 0.1, "corrupt_with": "noise"},
            "corrupt_with must be one of uniform, samples, got 'noise'",
        ),
        ({"corrupt_with": "samples"}, "corrupt_with=samples needs a --corrupt above 0"),
    ],
)
def test_shares_and_kinds_that_cannot_be_are_refused(changes, message, options):
    with pytest.raises(ValueError, match=message):
        options(**changes)
    assert not options().out.exists()
