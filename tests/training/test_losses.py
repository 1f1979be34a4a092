from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from diagd.decoding.schedule import DiagonalSchedule, SequenceLayout, TokenGrid
from diagd.decoding.teacher_forcing import teacher_view
from diagd.families.checkpoints import load_model
from diagd.models.attention import attend, attend_in_blocks, mask_in_parts
from diagd.training.mixture import MixtureLoss, ViewLoss, view_loss
from diagd.training.sequences import draw_batch
from tests.models.tiny import KINDS, random_tokens, tiny_model
from tests.worlds import SHARD_CODES as NUM_CODES
from tests.worlds import clips_of, write_shard_model

HEIGHT, WIDTH = 2, 3  # of the clips


def test_the_loss_of_raster_is_that_of_the_next_visual_token(tmp_path):
    """With a context that is learnt, all count but the very first token."""
    model = load_model(write_shard_model(tmp_path / "init"))
    grid = TokenGrid(2, HEIGHT, WIDTH)
    raster = DiagonalSchedule.raster(grid)
    view = teacher_view(raster, SequenceLayout(grid, 1, 1), learn_context=True)
    tokens = draw_batch(clips_of(), 3, 2, 0)
    with torch.no_grad():
        chances = model.logits(tokens[:, :-1]).log_softmax(-1)
        loss = ViewLoss(view, torch.device("cpu"))(model, tokens)
    expected = [
        -chances[row, place, target].item()
        for row in range(2)
        for place, target in enumerate(tokens[row, 1:].tolist())
        if target < NUM_CODES
    ]
    assert len(expected) == 2 * (3 * HEIGHT * WIDTH - 1)
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_the_dense_mask(tmp_path):
    """Its kernels want a GPU; what they are told, they can be told anywhere."""
    grid = TokenGrid(3, 2, 3)
    view = teacher_view(DiagonalSchedule(grid, 1, 2), SequenceLayout(grid, 1, 1))
    tokens, lanes = draw_batch(clips_of(), 4, 2, 0), len(view.positions)
    block_mask = create_block_mask(view.mask_mod(), None, None, lanes, lanes, device="cpu")
    targets = tokens[:, view.targets[view.readers]]
    in_blocks = partial(attend_in_blocks, block_mask=block_mask)
    attends = in_blocks, in_blocks
    inputs = tokens[:, view.sources], view.positions, attends, view.readers, targets
    with torch.no_grad():
        model = load_model(write_shard_model(tmp_path / "init"))
        flex = view_loss(model, *inputs)
        assert flex.item() == pytest.approx(
            ViewLoss(view, torch.device("cpu"))(model, tokens).item(), abs=1e-5
        )


def test_the_loss_compiles_as_one_graph(tmp_path, monkeypatch):
    """A break would leave parts of it to Python, and be seen by nobody."""
    whole = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    grid, model = TokenGrid(3, HEIGHT, WIDTH), load_model(write_shard_model(tmp_path / "init"))
    view = teacher_view(DiagonalSchedule(grid, 1, 2), SequenceLayout(grid, 1, 1))
    tokens = draw_batch(clips_of(), 4, 2, 0)
    plain, compiled = (
        ViewLoss(view, torch.device("cpu"), one)(model, tokens) for one in (False, True)
    )
    assert compiled.item() == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "compiled"),
    [
        ({"precision": "no"}, False),
        ({"precision": "bf16"}, True),
        ({"precision": "bf16", "compile": False}, False),
        ({"precision": "bf16", "minutes": 9.0}, False),
    ],
)
def test_a_cpu_compiles_the_loss_where_that_pays(asked, compiled, options, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda loss: calls.append(loss) or loss)
    monkeypatch.setattr("diagd.training.options.find_compiler", lambda: "c++")
    config = tiny_model(num_action_tokens=1).config
    MixtureLoss(options(**{"compile": True, **asked}), config, torch.device("cpu"))
    assert bool(calls) == compiled


def test_a_loss_that_cannot_be_compiled_names_the_flag_that_helps(tmp_path, monkeypatch):
    """As after a run that was killed while it compiled, and left an empty library."""

    def fails(graph, inputs):
        raise OSError("lib.so: file too short")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=fails))
    model = load_model(write_shard_model(tmp_path / "init"))
    grid = TokenGrid(3, HEIGHT, WIDTH)
    view = teacher_view(DiagonalSchedule(grid, 1, 2), SequenceLayout(grid, 1, 1))
    message = (
        r"^torch\.compile cannot compile a step here \(lib\.so: .*\): train with --no-compile$"
    )
    with pytest.raises(ValueError, match=message):
        ViewLoss(view, torch.device("cpu"), True)(model, draw_batch(clips_of(), 4, 2, 0))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_loss_of_a_model_with_sliding_layers_is_that_of_its_logits():
    grid, tokens, lags = TokenGrid(3, 3, 5), random_tokens(2, 15 + 3 * 17, vocab_size=44), (1, 2)
    model = tiny_model(**KINDS["sliding"])
    view = teacher_view(DiagonalSchedule(grid, *lags), SequenceLayout(grid, 2, 1))
    window, lanes = model.config.sliding_window, len(view.positions)
    inputs, targets = tokens[:, view.sources], tokens[:, view.targets[view.readers]]
    with torch.no_grad():
        loss = ViewLoss(view, torch.device("cpu"), sliding_window=window)(model, tokens)
        logits = model.logits(inputs, positions=view.positions, visible=view.visible())
        near = create_block_mask(view.mask_mod(window), None, None, lanes, lanes, device="cpu")
        seen = partial(attend, visible=view.visible())
        attends = seen, partial(attend_in_blocks, block_mask=near)
        flex = view_loss(model, inputs, view.positions, attends, view.readers, targets)
        world = tiny_model(**KINDS["world"])
        whole = view_loss(world, inputs, view.positions, (seen, seen), view.readers, targets)
    expected = F.cross_entropy(logits[:, view.readers].flatten(0, 1), targets.flatten()).item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert flex.item() == pytest.approx(expected, rel=1e-5)
    assert abs(whole.item() - expected) > 1e-3


def test_a_mask_in_parts_attends_as_the_whole_one():
    grid = TokenGrid(3, HEIGHT, WIDTH)
    mask = teacher_view(DiagonalSchedule(grid, 1, 2), SequenceLayout(grid, 1, 1)).visible()
    assert mask is not None
    parts = mask_in_parts(mask, 5)
    assert isinstance(parts, partial)
    groups = parts.keywords["groups"]
    assert len(groups) > 2
    assert groups[0].shape[1] < len(mask) // 2
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, len(mask), 8, generator=generator) for heads in (4, 2, 2)]
    found = []
    for attends in (partial(attend, visible=mask), parts):
        leaves = [one.clone().requires_grad_() for one in given]
        out = attends(leaves[0], leaves[1], leaves[2])
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)
