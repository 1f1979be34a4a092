import torch

from diagd.tokenizers.shards import TokenClips
from diagd.training import train
from diagd.training.train import DreamStrip
from tests.worlds import HEIGHT, NAMES, NUM_CODES, WIDTH, model_config, random_model, tokenizer


def strip_in(folder, frames=6) -> DreamStrip:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(NUM_CODES, (2, 7, HEIGHT, WIDTH), generator=generator)
    actions = torch.randint(len(NAMES), (2, 7), generator=generator)
    clips = TokenClips(tokens.to(torch.int16), actions.to(torch.int16), NUM_CODES, NAMES)
    return DreamStrip(folder, clips, tokenizer(), frames)


def test_a_strip_is_the_given_frames_and_what_the_model_writes_after_them(tmp_path):
    strip, model = strip_in(tmp_path), random_model(model_config())
    strip.add(model, 20)
    dream = strip._dream(model)
    assert dream.shape == (6, HEIGHT, WIDTH)
    assert dream[:1].equal(strip.tokens[0, :1])
    assert not dream[1:].equal(strip.tokens[0, 1:])
    assert dream.equal(strip._dream(model))  # the same noise at every stage: only the model differs
    names = sorted(path.name for path in (tmp_path / "dreams").iterdir())
    assert names == ["step_00000020.png", "truth.png"]


def test_strips_of_stages_that_a_killed_run_will_repeat_are_not_shown(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(train, "plot_dreams", lambda path, rows, given: shown.append([*rows]))
    strip, model = strip_in(tmp_path), random_model(model_config())
    for step in (10, 20, 15):
        strip.add(model, step)
    assert shown[-1] == ["truth", "step 10", "step 15"]


def test_the_picture_has_a_row_for_each_stage(tmp_path):
    strip, model = strip_in(tmp_path), random_model(model_config())
    strip.add(model, 10)
    one = (tmp_path / "dreams.png").read_bytes()
    assert one.startswith(b"\x89PNG")
    strip.add(model, 20)
    both = (tmp_path / "dreams.png").read_bytes()
    assert int.from_bytes(both[20:24]) > int.from_bytes(one[20:24])
