"""runs/draft_errors.py on a tiny world: what it measures, and that a killed run goes on."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from diagd.families.checkpoints import load_model
from diagd.families.clip_files import find_clips
from diagd.files import read_json_lines
from diagd.pipeline.generator import VideoGenerator
from runs import draft_errors
from tests.decoding.cases import reference_sampler
from tests.evaluation.lines import write_clips


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data") / "clips", count=3)


def options_of(world: Path, clips: Path, out: Path, **changes) -> draft_errors.Options:
    values = {
        "num_clips": 2,
        "frames": 5,
        "context_frames": 2,
        "lanes": (6,),
        "exact_frames": 2,
        "priced_frames": 3,
        "changes": 14,
    }
    values["models"] = (f"control={world}", f"same={world}")
    return draft_errors.Options(clips, out=out, **values | changes)


def test_a_killed_run_goes_on_and_like_models_are_alike(world, clips, tmp_path, monkeypatch):
    measure = draft_errors.measure
    draft_errors.main(options_of(world, clips, tmp_path / "whole"))

    def dying(world, name, options):
        if (tmp_path / "killed" / "draft_errors.jsonl").read_text().count("\n") == 3:
            raise KeyboardInterrupt
        return measure(world, name, options)

    monkeypatch.setattr(draft_errors, "measure", dying)
    with pytest.raises(KeyboardInterrupt):
        draft_errors.main(options_of(world, clips, tmp_path / "killed"))
    monkeypatch.setattr(draft_errors, "measure", measure)
    draft_errors.main(options_of(world, clips, tmp_path / "killed"))
    ours, theirs = (
        read_json_lines(tmp_path / name / "draft_errors.jsonl")[1:] for name in ("killed", "whole")
    )
    assert ours == theirs
    text = (tmp_path / "killed" / "draft_errors.md").read_text()
    assert text.startswith("2 clips; ± is the standard error of the difference to control.")
    for line in text.splitlines()[4:]:
        _, what, control, same, _ = (cell.strip() for cell in line.split("|"))
        mean, *error = same.split(" ± ")
        assert mean == control
        assert "TFD" in what or float(error[0]) == 0
    with pytest.raises(ValueError, match=r"was measured with other options: remove it, or choose"):
        draft_errors.main(options_of(world, clips, tmp_path / "killed", changes=2))


def test_a_torn_line_and_rows_of_other_weights_are_measured_again(
    world, clips, tmp_path, monkeypatch
):
    measured = []
    monkeypatch.setattr(draft_errors, "measure", lambda *given: measured.append(given[1]) or {})
    monkeypatch.setattr(draft_errors, "table", lambda rows, options: f"{len(rows)} rows")
    copy = shutil.copytree(world, tmp_path / "world")
    options = options_of(copy, clips, tmp_path, models=(f"control={copy}",))
    path = tmp_path / "draft_errors.jsonl"
    draft_errors.main(options)
    path.write_text(path.read_text() + '{"torn')
    draft_errors.main(options)
    assert len(measured) == 2
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config) + "\n\n")
    draft_errors.main(options)
    assert len(measured) == 4
    assert (tmp_path / "draft_errors.md").read_text() == "2 rows"
    first, *rows = read_json_lines(path)
    for row in rows:
        del row["weights"]
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, *rows[:2])))
    draft_errors.main(options)  # older rows do not say of which weights they are
    assert len(measured) == 4


def test_a_changed_token_turns_the_draws_of_later_ones(world, clips, tmp_path):
    """Counted again with a whole forward for each change, and no cache."""
    options = options_of(world, clips, tmp_path)
    generator = VideoGenerator.from_pretrained(world)
    file = find_clips(clips, generator.vocabulary)["clip_0"]
    clip = file.read(5, size_px=generator.frame_size_px)
    engine = draft_errors.start(generator, clip, "clip_0", options)
    model, (low, high) = load_model(world), (engine.stream.ranges.low, engine.stream.ranges.high)
    seed, sampling = int(engine.batch.buffers.seeds[0]), engine.stream.sampling

    def drawn(tokens, place, seed, banned=None):
        logits = model.logits(tokens)[0, -16 + place]  # read one token earlier
        if banned is not None:
            logits[banned] = -torch.inf
        draw = reference_sampler([seed], sampling.temperature, None, sampling.top_p, (low, high))
        return int(draw(logits[None], 0, place // 5, place % 5))

    with torch.inference_mode():
        counts = list(draft_errors.turned(engine, options))
        true = engine.stream.tokens[:, : engine.stream.num_used]
        draws = [drawn(true, place, seed) for place in range(15)]
        expected = []
        for place in range(14):
            changed = true.clone()
            changed[0, -15 + place] = drawn(true, place, seed + 1, true[0, -15 + place])
            later = range(place + 1, 15)
            expected.append(sum(drawn(changed, one, seed) != draws[one] for one in later))
    assert sorted(counts) == sorted(expected)  # in an order of its own
    assert sum(counts) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("doom",)}, "models must look like NAME=FOLDER, got 'doom'"),
        ({"models": ()}, "models must look like NAME=FOLDER, got ''"),
        ({"frames": 2}, "frames must be above context_frames, got 2"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message, tmp_path):
    values = {"clips": tmp_path, "models": ("a=b",), "context_frames": 2} | changes
    with pytest.raises(ValueError, match=message):
        draft_errors.Options(**values)
