import base64
import json
import zlib

import pytest
import torch

from diagd.web.play.saved import MAX_FRAMES, load, save
from diagd.web.play.session import Controls, Session, Start
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames


@pytest.fixture(scope="module")
def session(dreamer):
    session = Session(dreamer, Start(smooth_frames(2, HEIGHT_PX, WIDTH_PX), ("left",), 3))
    for order in (1, "raster", 2):
        session.advance("right", Controls(order, 1.5, 0.8))
    return session


@pytest.fixture
def document(session):
    return json.loads(json.dumps(save(session, "doom")))


def test_what_was_saved_is_loaded_and_dreamt_again(session, document, dreamer):
    dream = load(document, dreamer)
    assert torch.equal(dream.start.frames, session.start.frames)
    assert (dream.start.actions, dream.start.seed) == (("left",), 3)
    assert dream.moments == tuple(session.history)
    again = Session(dreamer, dream.start)
    for moment in dream.moments:
        again.advance(moment.action, moment.controls)
    assert again.history == session.history


def change(path, value):
    def changed(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        document[last] = value

    return changed


DAMAGE = {
    "this is no saved dream": change(["format"], "other"),
    "no start or no frames": change(["start"], None),
    "no start or no frames$": change(["frames"], {}),
    f"at most {MAX_FRAMES} frames": change(["frames"], [[]] * (MAX_FRAMES + 1)),
    "start has no shape": change(["start", "shape"], [2, "24", 40, 3]),
    "frames of 48x40 pixels, this model 24x40": change(["start", "shape"], [2, 48, 40, 3]),
    "frames of 24x40 pixels": change(["start", "shape"], [10**9, 24, 40, 3]),
    "start needs 1 actions": change(["start", "actions"], []),
    "unknown action 'fly'": change(["start", "actions"], ["fly"]),
    "an action must be a short text": change(["start", "actions"], [7]),
    "start frames are damaged": change(["start", "pixels"], "AAAA"),
    "start frames are damaged$": change(["start", "pixels"], None),
    "seed must be a whole number": change(["seed"], "1"),
    "must have five entries": change(["frames", 0], ["left", 1]),
    "must have five entries, got": change(["frames", 0], ["left", 1, 1, 1, "x"]),
    "unknown action 'jump'": change(["frames", 0, 0], "jump"),
    "row_lag must be in": change(["frames", 0, 1], 6),
    "order must be raster": change(["frames", 0, 1], [1]),
    "temperature must be in": change(["frames", 0, 2], "hot"),
    "top_p must be in": change(["frames", 0, 3], 0),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_document_is_refused(message, document, dreamer):
    DAMAGE[message](document)
    with pytest.raises(ValueError, match=message):
        load(document, dreamer)


@pytest.mark.parametrize("document", [None, [], "x", 1, {}])
def test_what_is_no_document_is_refused(document, dreamer):
    with pytest.raises(ValueError, match="this is no saved dream"):
        load(document, dreamer)


def test_pixels_that_inflate_without_end_are_not_inflated(document, dreamer):

    bomb = zlib.compress(bytes(200 * 2**20), 9)
    document["start"]["pixels"] = base64.b64encode(bomb).decode()
    assert load(document, dreamer).start.frames.numel() == 2 * HEIGHT_PX * WIDTH_PX * 3
