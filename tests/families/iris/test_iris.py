"""IRIS in miniature, as its agents are saved, against a plain reading of its facts."""

import json

import pytest
import torch
from PIL import Image

import diagd
from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_video
from diagd.families.checkpoints import find_model
from diagd.families.presets import PRESETS
from diagd.models.transformer import Transformer
from tests import oracles
from tests.families.images import check_converted
from tests.families.iris.plain import (
    PlainAgentTokenizer,
    agent_tokenizer,
    greedy_frames,
    plain_logits,
    random_agent,
    random_agent_tokenizer,
)
from tests.models.tiny import random_tokens
from tests.worlds import smooth_frames

HIDDEN, LAYERS, HEADS, CODES, ACTIONS, SIDE, FRAMES = 32, 2, 4, 24, 5, 3, 4
GREEDY = diagd.SamplingOptions()


@pytest.fixture(scope="module")
def weights():
    return random_agent(HIDDEN, LAYERS, CODES, ACTIONS, SIDE, FRAMES)


@pytest.fixture(scope="module")
def tokenizer():
    return random_agent_tokenizer(CODES)


@pytest.fixture(scope="module")
def released(weights, tokenizer, tmp_path_factory):
    """Write an agent as its trainer does."""
    path = tmp_path_factory.mktemp("iris") / "Breakout.pt"
    torch.save({**weights, **agent_tokenizer(tokenizer)}, path)
    return path


@pytest.fixture(scope="module")
def world(released):
    return diagd.VideoGenerator.from_pretrained(released)


def logits_of_lanes(weights):
    """The plain reading as the oracles call it, of our ids: actions stand behind the codes."""

    def logits_fn(tokens, positions, visible):
        lanes = [
            (at, id - CODES if id >= CODES else id, id >= CODES)
            for at, id in zip(positions.tolist(), tokens[0].tolist(), strict=True)
        ]
        return plain_logits(weights, HEADS, lanes, visible)[None]

    return logits_fn


@pytest.mark.proves("IRIS", "logits")
def test_logits_are_those_of_the_plain_reading(weights, released):
    model = diagd.load_model(released)
    tokens = random_tokens(1, FRAMES * (SIDE**2 + 1), vocab_size=CODES + ACTIONS)
    causal = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool()
    expected = logits_of_lanes(weights)(tokens, torch.arange(tokens.shape[1]), causal)
    logits = model.logits(tokens)[..., :CODES]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.5


@pytest.mark.proves("IRIS", "raster")
def test_raster_order_is_its_own_loop_past_a_full_context(weights, world):
    """Four frames fit; then it goes on from the last one alone, as its own code does."""
    frame = smooth_frames(1, 8 * SIDE, 8 * SIDE)
    given = world.tokenizer.encode(frame)[0]
    actions = [1, 4, 0, 2, 3, 1, 1]
    names = [world.vocabulary.names[action] for action in actions]
    video = world.generate(frame, names, strategy="raster", sampling=GREEDY)
    assert torch.equal(video.tokens, greedy_frames(weights, HEADS, given, actions))
    assert video.stats.num_dropped_frames > 0
    assert len(video.tokens.unique()) > 4


@pytest.mark.proves("IRIS", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 2])
def test_diagonals_are_those_of_a_decoder_without_a_cache(weights, world, row_lag):
    frame = smooth_frames(1, 8 * SIDE, 8 * SIDE, seed=1)
    given = world.tokenizer.encode(frame).flatten(1)
    actions = [1, 4, 2]
    frame_lag = (SIDE - 1) * row_lag + SIDE
    expected = oracles.diagonal_reference(
        logits_of_lanes(weights),
        given,
        *(len(actions), SIDE, SIDE, row_lag, frame_lag),
        actions=CODES + torch.tensor(actions)[None, :, None],
        context_frames=1,
    )
    video = world.generate(frame, actions, strategy=f"k={row_lag}", sampling=GREEDY)
    assert torch.equal(video.tokens, expected[0])
    assert video.stats.num_steps == len(actions) * frame_lag


@pytest.mark.proves("IRIS", "pixels")
def test_pixels_are_those_of_its_tokenizer(tokenizer, world):
    plain = PlainAgentTokenizer(tokenizer)
    frames = smooth_frames(3, 8 * SIDE, 8 * SIDE)
    tokens = world.tokenizer.encode(frames)
    assert torch.equal(tokens, plain.encode(frames.movedim(-1, 1) / 127.5 - 1))
    assert len(tokens.unique()) > 3
    drawn = random_tokens(2, SIDE, SIDE, vocab_size=CODES)
    painted = ((plain.decode(drawn) + 1) / 2).clamp(0, 1).movedim(1, -1) * 255
    difference = painted - world.tokenizer.decode(drawn)
    assert -0.01 < difference.min() < difference.max() < 1.01  # rounded down


def test_frames_are_scaled_as_a_whole(world, released, command, tmp_path):
    """Pillow's bilinear filter, as in its environment; so in a folder of ours as well."""
    screen = smooth_frames(1, 70, 53)
    with Image.fromarray(screen[0].numpy()) as picture:
        small = picture.resize((8 * SIDE, 8 * SIDE), Image.Resampling.BILINEAR)
    expected = torch.tensor(list(small.tobytes())).view(1, 8 * SIDE, 8 * SIDE, 3)
    assert command("convert", released, tmp_path / "ours").code == 0
    ours = diagd.VideoGenerator.from_pretrained(tmp_path / "ours")
    for one in (world, ours):
        fitted = one.read_prompt(screen).frames
        assert (fitted.int() - expected).abs().max() <= 1


def test_a_folder_of_ours_makes_the_same_video(world, released, command, tmp_path):
    given = smooth_frames(1, 8 * SIDE, 8 * SIDE), "action 2*3"
    video = world.generate(*given, seed=4)
    ours = check_converted(command, released, tmp_path / "ours", video, *given, seed=4)
    assert (ours.defaults, ours.vocabulary) == (world.defaults, world.vocabulary)


def test_actions_are_numbered_unless_a_file_names_them(world, weights, tokenizer, tmp_path):
    assert world.vocabulary.names == ("noop", "action 1", "action 2", "action 3", "action 4")
    path = tmp_path / "last.pt"
    torch.save({**weights, **agent_tokenizer(tokenizer)}, path)
    names = ["noop", "fire", "right", "left", "up"]
    (tmp_path / "actions.json").write_text(json.dumps({"names": names}))
    named = diagd.VideoGenerator.from_pretrained(tmp_path)  # the folder of a run
    assert named.vocabulary is not None
    assert list(named.vocabulary.names) == names
    every = random_agent(HIDDEN, 1, CODES, 18, SIDE, FRAMES)
    torch.save({**every, **agent_tokenizer(tokenizer)}, tmp_path / "Boxing.pt")
    (tmp_path / "actions.json").unlink()
    full = diagd.VideoGenerator.from_pretrained(tmp_path / "Boxing.pt")
    assert full.vocabulary is not None
    assert full.vocabulary.names[::17] == ("noop", "downleftfire")


def test_it_runs_at_the_command_line(released, command, tmp_path):
    screen = smooth_frames(1, 8 * SIDE, 8 * SIDE)[0]
    Image.fromarray(screen.numpy()).save(tmp_path / "screen.png")
    flags = "--model", released, "--prompt", tmp_path / "screen.png", "--actions", "action 1*3"
    outcome = command("generate", *flags, "--output", tmp_path / "dream.mp4", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["runs"][-1]["strategy"] == "k=1"
    native = command("generate", *flags, "--backend", "native")
    native.assert_refused("kernels do not support cross-attention, position tables, exact GELU")


@pytest.mark.proves("IRIS", "evaluate")
def test_clips_are_continued_and_priced(weights, world, released, command, tmp_path):
    """Their price is that of the plain reading."""
    (tmp_path / "clips").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", smooth_frames(4, 8 * SIDE, 8 * SIDE), fps=15)
    names = ["noop", "action 2", "action 1", "action 4"]
    write_actions(tmp_path / "clips" / "a.jsonl", names)
    flags = "--model", released, "--clips", tmp_path / "clips", "--num-clips", 1, "--frames", 4
    flags = *flags, "--strategy", "k=1", "--out", tmp_path / "out", "--json"
    outcome = command("evaluate", *flags)
    assert outcome.code == 0, outcome.err
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    assert rows["k=1"]["num_steps"] == 3 * (2 * SIDE - 1)
    priced = command("evaluate", *flags, "--teacher-forced")
    assert priced.code == 0, priced.err
    frames = world.tokenizer.encode(read_video(tmp_path / "clips" / "a.mp4").frames).flatten(1)
    ids = torch.tensor([[CODES + world.vocabulary.names.index(name)] for name in names])
    sequence = torch.cat([ids, frames], 1).flatten()[1:]
    length = len(sequence)
    causal = torch.ones(length, length).tril().bool()
    logits = logits_of_lanes(weights)(sequence[None], torch.arange(length), causal)[0]
    costs = -logits.log_softmax(-1)[:-1].gather(1, sequence[1:, None] % CODES)[:, 0]
    is_drawn = (sequence[1:] < CODES) & (torch.arange(1, length) > SIDE**2)
    rows = {row["strategy"]: row for row in priced.document["rows"]}
    assert rows["raster"]["nll"] == pytest.approx(costs[is_drawn].mean().item(), abs=1e-3)
    longer = command("evaluate", *flags, "--teacher-forced", "--frames", 5, "--json")
    longer.assert_refused("expected at least 5 frames")


def test_its_preset_is_that_of_the_paper():
    """10 layers of 256; the paper counts heads of codes, rewards and ends."""
    config = PRESETS["iris"]
    with torch.device("meta"):
        blocks = Transformer(config).model.layers
    size = config.hidden_size
    per_block = 4 * (size * size + size) + 2 * 4 * size * size + 5 * size + 4 * size
    assert sum(weight.numel() for weight in blocks.parameters()) == 10 * per_block
    assert config.frames_held == 20


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"world_model.head_observations.indices": torch.zeros(8)}, "got 2 tokens"),
        ({"world_model.gate.weight": torch.zeros(8)}, "1 unknown tensor: gate.weight"),
        ({"world_model.transformer.ln_f.weight": None}, "1 missing tensor: transformer.ln_f"),
        ({"world_model.head_rewards.indices": None}, "missing key 'head_rewards.indices'"),
    ],
)
def test_files_that_are_none_are_refused_in_one_line(edit, message, weights, tmp_path):
    edited = {name: tensor for name, tensor in (weights | edit).items() if tensor is not None}
    torch.save(edited, tmp_path / "agent.pt")
    with pytest.raises(ValueError, match=rf"agent\.pt: IRIS checkpoint: .*{message}") as caught:
        find_model(tmp_path / "agent.pt")
    assert "\n" not in str(caught.value)


def test_another_number_of_heads_is_told_in_a_config(released, tmp_path):
    (tmp_path / "heads.json").write_text('{"num_heads": 2}')
    assert find_model(released).config.num_heads == HEADS
    assert find_model(released, tmp_path / "heads.json").config.num_heads == 2


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_config_of_heads_alone_makes_no_folder_of_ours(is_beside, released, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "last.pt").symlink_to(released)
    heads = (run if is_beside else tmp_path) / "config.json"
    heads.write_text('{"num_heads": 2}')
    found = find_model(run, None if is_beside else heads)
    assert (found.family.name, found.config.num_heads) == ("IRIS", 2)
