"""From a class to a picture, with the files as LlamaGen releases them and with a folder of ours."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from diagd.decoding.sampling import SamplingOptions
from diagd.families.llamagen import ImageNetClasses
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.prompts import seed_of
from diagd.tokenizers.text import TextIds
from tests.families.images import guided_price
from tests.families.llamagen.folders import HEADS, HIDDEN, LAYERS, NUM_CODES, SIDE, write_llamagen
from tests.families.llamagen.plain import greedy_image, plain_logits, random_checkpoint
from tests.worlds import smooth_frames

GUIDANCE = 4.0
GREEDY = SamplingOptions()


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    return write_llamagen(tmp_path_factory.mktemp("llamagen"))


@pytest.fixture(scope="module")
def world(released) -> VideoGenerator:
    return VideoGenerator.from_pretrained(released)


def expected(label: int, scale: float) -> torch.Tensor:
    weights = random_checkpoint(HIDDEN, LAYERS, NUM_CODES)
    return greedy_image(weights, HEADS, SIDE, SIDE, label, scale)


def test_classes_are_numbers():
    classes = ImageNetClasses()
    for name in ("class 207", "207"):
        assert classes.tokens_of(name) == classes.tokens_of(classes.names[207]) == (207,)
    assert classes.tokens_of("none") == (1000,)
    assert classes.action_of({"action": "207"}) == "207"
    for name in ("class 1000", "dog", "-1", ""):
        with pytest.raises(ValueError, match=r"unknown class '.*', expected class 0 to class"):
            classes.tokens_of(name)
    with pytest.raises(ValueError, match=r'expected \{"action": NAME\}, got \{"action": 3\}'):
        classes.action_of({"action": 3})


@pytest.mark.parametrize("scale", [GUIDANCE, 1.0])
def test_an_image_is_that_of_its_greedy_loop_guided_by_default(world, scale):
    asked = {} if scale == GUIDANCE else {"guidance": scale}
    video = world.generate(None, "class 207", strategy="raster", sampling=GREEDY, **asked)
    assert torch.equal(video.tokens[0], expected(207, scale))
    assert video.frames.shape == (1, 32, 32, 3)


def test_several_images_follow_from_several_classes(world):
    """Each begins anew; so do the images of a batch."""
    how = {"strategy": "raster", "sampling": GREEDY}
    video = world.generate(None, "class 207,class 5", **how)
    batch = world.generate([None, None], ["class 207", "class 5"], **how)
    for number, label in enumerate((207, 5)):
        assert torch.equal(video.tokens[number], expected(label, GUIDANCE))
        assert torch.equal(batch[number].tokens[0], expected(label, GUIDANCE))
    engine = world.start(None, sampling=GREEDY)
    (tokens,) = engine.decode("raster", world.action_ids(["class 207"], 1, "image"), 1)
    assert torch.equal(tokens[0], expected(207, GUIDANCE))


def test_the_card_shows_how_to_make_an_image(world, tmp_path):
    world.save_pretrained(tmp_path / "saved")
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "\nGenerates images of 32x32 pixels from class 0 ... class 999.\n" in card
    assert len(card) < 1000
    code = card.split("```")[1].removeprefix("python")
    exec(code.replace("dream.png", str(tmp_path / "dream.png")), {})
    assert (tmp_path / "dream.png").is_file()


def test_what_does_not_fit_is_refused(world, released, command):
    outcome = command("play", "--model", released, "--port", 0)
    outcome.assert_refused("makes single images, so there is nothing to play: diagd generate")
    outcome = command("generate", "--model", released, "--actions", "class 3,class 4")
    outcome.assert_refused(r"expected 1 actions \(one per frame\), got 2: use --frames 2")
    with pytest.raises(ValueError, match="prompt must be left out: this model takes actions alone"):
        world.generate(smooth_frames(1, 32, 32), "class 207")
    with pytest.raises(ValueError, match="expected 1 actions, one for each generated frame, got 0"):
        world.generate(None, num_frames=1)
    other = VideoGenerator.from_pretrained("doom")
    with pytest.raises(ValueError, match=r"this model takes no guidance, got 2\.0"):
        other.generate(smooth_frames(1, *other.frame_size_px), "forward", guidance=2.0)
    with pytest.raises(ValueError, match=r"frames must be \(T, H_px, W_px, 3\) uint8 RGB, got obj"):
        other.generate(None, "forward")


@pytest.mark.proves("LlamaGen", "evaluate")
@pytest.mark.parametrize("scale", [GUIDANCE, 1.0])
def test_prices_are_those_of_a_decoder_without_a_cache(scale, released, world, command, tmp_path):
    """Of raster's own tokens, which the reference must write, for each class of a file."""
    (tmp_path / "classes.txt").write_text("class 207\n3\n")
    flags = "--model", released, "--prompts", tmp_path / "classes.txt", "--out", tmp_path / "out"
    outcome = command("evaluate", *flags, "--strategy", "k=1", "--guidance", scale, "--json")
    assert outcome.code == 0, outcome.err
    weights, costs = random_checkpoint(HIDDEN, LAYERS, NUM_CODES), {"raster": 0.0, "k=1": 0.0}

    def full(tokens, positions, visible):
        lanes = list(zip(positions.tolist(), [0, *tokens[0, 1:].tolist()], strict=True))
        label = int(tokens[0, 0]) - NUM_CODES
        return plain_logits(weights, HEADS, SIDE, label, lanes, visible)[None]

    for prompt, label in (("class 207", 207), ("3", 3)):
        seed = seed_of(prompt, 0)
        raster = world.generate(None, prompt, strategy="raster", seed=seed, guidance=scale).tokens
        given, nothing = (NUM_CODES + torch.tensor([[one]]) for one in (label, 1000))
        ids = TextIds(given, nothing)
        for strategy, row_lag in (("raster", SIDE), ("k=1", 1)):
            costs[strategy] += guided_price(full, ids, scale, raster[0], row_lag, None) / 2
    for row in outcome.document["rows"]:
        assert row["nll"]["mean"] == pytest.approx(costs[row["strategy"]], abs=1e-3)
        assert row["clips"] == 2


def test_the_command_line_writes_a_picture(released, command, tmp_path):
    picture = tmp_path / "dog.png"
    flags = "--actions", "class 207", "--output", picture, "--dtype", "float32", "--json"
    outcome = command("generate", "--model", released, *flags)
    assert outcome.code == 0, outcome.err
    first = picture.read_bytes()
    with Image.open(picture) as image:
        assert min(image.size) >= 32
    outcome = command("convert", released, tmp_path / "ours", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["family"] == "LlamaGen"
    outcome = command("generate", "--model", tmp_path / "ours", *flags)
    assert outcome.code == 0, outcome.err
    assert picture.read_bytes() == first
    outcome = command("generate", "--model", released, *flags, "--guidance", 1.0)
    assert outcome.code == 0, outcome.err
    assert picture.read_bytes() != first


def test_the_command_line_says_what_is_missing(released, command, tmp_path):
    outcome = command("generate", "--model", released, "--output", tmp_path / "dog.png")
    assert outcome.code == 2
    assert "give --actions none*1" in outcome.err
    alone = tmp_path / "c2i_B_256.pt"
    alone.write_bytes(released.read_bytes())
    outcome = command("generate", "--model", alone, "--actions", "class 1")
    assert outcome.code == 2
    assert "expected its tokenizer, such as vq_ds16_c2i.pt, beside it" in outcome.err
