"""runs/transplant.py: the same codes in another order make the same world, in that order."""

import pytest
import torch

from diagd.data.actions import ActionVocabulary
from diagd.data.video import write_video
from diagd.families.checkpoints import load_model
from diagd.pipeline.generator import VideoGenerator
from diagd.tokenizers.vq import VQTokenizer
from runs import transplant
from tests.worlds import HEIGHT_PX, NAMES, NUM_CODES, WIDTH_PX, smooth_frames

NEW_NAMES = ("none", "left", "right", "attack", "forward+left", "left+attack")


@pytest.fixture
def renumbered(world, tmp_path):
    """Return a folder with the world's tokenizer, whose code i is now order[i], and the order."""
    order = torch.randperm(NUM_CODES, generator=torch.Generator().manual_seed(0))
    tokenizer = VQTokenizer.from_pretrained(world / "tokenizer")
    codes = tokenizer.model.quantize.embedding.weight.data
    codes[order] = codes.clone()
    folder = tmp_path / "tokens"
    tokenizer.save_pretrained(folder / "tokenizer")
    ActionVocabulary(NEW_NAMES).save(folder / "actions.json")
    return folder, order


def test_codes_take_what_those_at_their_places_had_learnt(world, renumbered, tmp_path):
    folder, order = renumbered
    clips = tmp_path / "clips"
    clips.mkdir()
    for seed in range(3):
        frames = smooth_frames(8, HEIGHT_PX, WIDTH_PX, seed)
        write_video(clips / f"clip_{seed}.mp4", frames, fps=8)
    options = transplant.Options(str(world), folder, clips, tmp_path / "out", frame_stride=1)
    transplant.main(options)
    before, after = load_model(str(world)), load_model(tmp_path / "out")
    assert after.config.vocab_size == NUM_CODES + len(NEW_NAMES)
    generator = VideoGenerator.from_pretrained(str(tmp_path / "out"))
    assert generator.vocabulary == ActionVocabulary(NEW_NAMES)
    frames = smooth_frames(8, HEIGHT_PX, WIDTH_PX, 1)
    seen = generator.tokenizer.encode(frames).unique()
    assert len(seen) > 3
    old = torch.argsort(order)[seen]
    for name in transplant.PER_CODE:
        torch.testing.assert_close(after.state_dict()[name][seen], before.state_dict()[name][old])
    embeddings = before.model.embed_tokens.weight[NUM_CODES:]
    left, forward, none = (embeddings[NAMES.index(name)] for name in ("left", "forward", "none"))
    expected = torch.stack([none, (forward + left) / 2, left])
    actions = after.model.embed_tokens.weight[NUM_CODES:]
    torch.testing.assert_close(actions[[3, 4, 5]], expected)


def test_a_folder_without_clips_is_named(world, renumbered, tmp_path):
    options = transplant.Options(str(world), renumbered[0], tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"no clips .* in"):
        transplant.main(options)
