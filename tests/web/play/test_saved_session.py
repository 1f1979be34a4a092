import base64
import dataclasses
import json
import zlib

import pytest
import torch

from diagd.decoding.strategies.table import Diagonal, Raster
from diagd.pipeline.scenes import model_scenes
from diagd.web.play.session import (
    MAX_FRAMES,
    Controls,
    Session,
    SessionLog,
    load_log,
    name_of,
    save_log,
)
from diagd.web.play.welcome import with_own_names
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames


@pytest.fixture(scope="module")
def session(generator):
    session = Session(generator, SessionLog(smooth_frames(2, HEIGHT_PX, WIDTH_PX), ("left",), 3))
    for strategy in (Diagonal(1), Raster(), Diagonal(2)):
        session.advance("right", Controls(strategy, 1.5, 0.8))
    return session


@pytest.fixture
def document(session, generator):
    return json.loads(save_log(session.log, name_of(generator)))


def test_what_was_saved_is_loaded_and_dreamt_again(session, document, generator):
    saved = load_log(json.dumps(document), generator)
    assert torch.equal(saved.frames, session.start.frames)
    assert (saved.actions, saved.seed) == (("left",), 3)
    assert saved.history == tuple(session.history)
    again = Session(generator, saved)
    for record in saved.history:
        again.advance(record.action, record.controls)
    assert again.history == session.history


def test_controls_are_saved_by_name_and_one_that_is_left_out_has_its_default(document, generator):
    """So a file stays right when a control is added."""
    controls = {"strategy": "k=1", "temperature": 1.5, "top_p": 0.8}
    assert document["frames"][0]["controls"] == controls
    del document["frames"][0]["controls"]["temperature"]
    (first, *_) = load_log(json.dumps(document), generator).history
    assert first.controls == Controls(Diagonal(1), Controls.temperature, 0.8)


def test_a_dream_of_a_scene_is_saved_without_pixels_and_finds_the_scene_by_its_name(
    session, world, generator
):
    scenes = model_scenes(world, generator, 2)
    log = SessionLog(scenes[1].frames, scenes[1].actions, 3, session.log.history, scenes[1].name)
    text = save_log(log, name_of(generator))
    assert json.loads(text)["scene"] == "view 3"
    assert len(text) < 600
    saved = load_log(text, generator, scenes[::-1])
    assert torch.equal(saved.frames, scenes[1].frames)
    assert (saved.name, saved.actions) == ("view 3", scenes[1].actions)
    with pytest.raises(ValueError, match="begins with a scene that is not here: 'view 3'"):
        load_log(text, generator, scenes[:1])
    with pytest.raises(ValueError, match="a dream of the world 'maze', not of 'played"):
        load_log(save_log(log, "maze"), generator, scenes)


def test_scenes_of_one_name_are_told_apart(world, generator):
    opening, view, *_ = model_scenes(world, generator, 2)
    second = dataclasses.replace(view, name="view 3 2")
    found = [scene.name for scene in with_own_names([view, second, opening, view, view])]
    assert found == ["view 3", "view 3 2", "opening", "view 3 3", "view 3 4"]


def test_a_frame_of_a_link_has_no_checksum(document, generator):
    del document["frames"][0]["checksum"]
    assert load_log(json.dumps(document), generator).history[0].checksum is None


def change(path, value):
    def changed(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        document[last] = value

    return changed


RECORD = {"action": "left", "controls": {}, "checksum": 1}
DAMAGE = {
    r"^not a saved dream: format: expected 'diagd-dream-2', got 'diagd-session-2' \(of another": (
        change(["format"], "diagd-session-2")
    ),
    "not a saved dream: start: Input should be an object": change(["start"], 7),
    "begins with a scene that is not here: None": change(["start"], None),
    "not a saved dream: frames: Input should be a valid array": change(["frames"], {}),
    f"should have at most {MAX_FRAMES} items": change(["frames"], [RECORD] * (MAX_FRAMES + 1)),
    r"start.shape.1: Input should be a valid integer": change(["start", "shape"], [2, "24", 40, 3]),
    "frames of 48x40 pixels, this model 24x40": change(["start", "shape"], [2, 48, 40, 3]),
    "starts with 1 to 64 frames, got 1000000000": change(["start", "shape"], [10**9, 24, 40, 3]),
    "start needs 1 actions": change(["start", "actions"], []),
    "unknown action 'fly'": change(["start", "actions"], ["fly"]),
    "start.actions.0: Input should be a valid string": change(["start", "actions"], [7]),
    "start frames are damaged": change(["start", "pixels"], "AAAA"),
    "start frames are damaged$": change(["start", "pixels"], "?"),
    "seed must be in": change(["seed"], -1),
    "seed: Input should be a valid integer": change(["seed"], "1"),
    "frames.0: Input should be an object": change(["frames", 0], ["left", 1]),
    "frames.0.checksum: Input should be a valid integer": change(["frames", 0, "checksum"], "x"),
    "unknown action 'jump'": change(["frames", 0, "action"], "jump"),
    "action: String should have at most 800": change(["frames", 0, "action"], "x" * 801),
    "row_lag must be in": change(["frames", 0, "controls", "strategy"], "k=6"),
    "strategy: strategy must look like": change(["frames", 0, "controls", "strategy"], "k"),
    "strategy must be a name, got": change(["frames", 0, "controls", "strategy"], {}),
    "controls.temperature: Input should": change(["frames", 0, "controls", "temperature"], "hot"),
    "controls.top_p: Input should be gr": change(["frames", 0, "controls", "top_p"], 0),
    "controls.more: Unexpected": change(["frames", 0, "controls", "more"], 0),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_document_is_refused(message, document, generator):
    DAMAGE[message](document)
    with pytest.raises(ValueError, match=message):
        load_log(json.dumps(document), generator)


@pytest.mark.parametrize("data", ["null", "[]", '"x"', "1", "{}", "{", "[" * 100_000, b"\xff"])
def test_what_is_no_document_is_refused(data, generator):
    with pytest.raises(ValueError, match=r"^not a saved dream"):
        load_log(data, generator)


def test_pixels_that_inflate_without_end_are_not_inflated(document, generator):
    bomb = zlib.compress(bytes(200 * 2**20), 9)
    document["start"]["pixels"] = base64.b64encode(bomb).decode()
    frames = load_log(json.dumps(document), generator).frames
    assert frames.numel() == 2 * HEIGHT_PX * WIDTH_PX * 3
