"""Videos that go on from clips: those that the model makes alone, and what is said of mistakes."""

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from diagd.data.video import encode_video, read_video
from diagd.pipeline.generator import VideoGenerator
from tests.web.play.serving import wait_until
from tests.web.serve.serving import pixels_of, serving
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames, write_world

VIDEOS = "/v1/videos/continuations"
CLIP = smooth_frames(3, HEIGHT_PX, WIDTH_PX, seed=5)
BETWEEN = ["left", "right"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("serve") / "tiny-world")


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as served:
        yield served


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Return the bytes of a clip without loss, that is as its file is read."""
    return encode_video(CLIP[-1:], 8, "png")


def asked_for(clip, **settings):
    clip = base64.b64encode(clip).decode()
    return {"clip": clip, "actions": "left*2,right*3", "frames": 5, **settings}


def alone(folder, actions, strategy, seed, count=5):
    world = VideoGenerator.from_pretrained(folder, dtype="float32")
    video = world.generate(CLIP[-1], actions, count, strategy=strategy, seed=seed)
    return video.frames


def frames_of(answer):
    pictures = [base64.b64decode(one["b64_json"]) for one in answer.json()["data"]]
    return torch.stack([pixels_of(picture) for picture in pictures])


@pytest.mark.filterwarnings("ignore:the world has learned nothing")
def test_videos_of_many_at_once_are_those_that_each_is_alone(served, folder, clip):
    ways = [("k=1", 3), ("raster", 4), ("exact", 5), ("k=2", 6)]

    def ask(way):
        settings = {"strategy": way[0], "seed": way[1], "output_format": "frames"}
        return served.post(VIDEOS, json=asked_for(clip, **settings))

    with ThreadPoolExecutor(len(ways)) as pool:
        answers = list(pool.map(ask, ways))
    for (strategy, seed), answer in zip(ways, answers, strict=True):
        expected = alone(folder, "left*2,right*3", strategy, seed)
        assert torch.equal(frames_of(answer), expected), strategy
        assert answer.json()["seed"] == seed


@pytest.mark.parametrize("kind", ["mp4", "webp", "gif"])
def test_a_form_makes_a_file(served, clip, kind, tmp_path):
    fields = {"actions": "left", "frames": "4", "seed": "1", "output_format": kind}
    answer = served.post(VIDEOS, data=fields, files={"clip": ("a.png", clip)})
    assert answer.headers["content-type"] == {"mp4": "video/mp4"}.get(kind, f"image/{kind}")
    assert answer.headers["x-diagd-seed"] == "1"
    (tmp_path / f"a.{kind}").write_bytes(answer.content)
    assert read_video(tmp_path / f"a.{kind}").frames.shape == (4, HEIGHT_PX, WIDTH_PX, 3)


def test_progress_is_told_by_events(served, clip):
    settings = {"frames": 5, "stream": True, "output_format": "frames"}
    answer = served.post(VIDEOS, json=asked_for(clip, **settings))
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    told = [json.loads(line[6:]) for line in lines]
    kinds = [one["type"].removeprefix("video_continuation.") for one in told]
    assert kinds == ["progress"] * 5 + ["frame"] * 5 + ["completed"]
    assert [one["written"] for one in told[:5]] == [1, 2, 3, 4, 5]


def test_who_goes_away_frees_the_rows(served, clip):
    body = asked_for(clip, frames=64, actions="left*64", strategy="raster")
    with served.held_up(), pytest.raises(httpx.TimeoutException):
        httpx.post(served.url + VIDEOS, json=body, timeout=0.5)
    wait_until(lambda: not served.scheduler.running)
    assert served.metric("diagd_rows_in_use") == 0


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"frames": 65}, "frames", "frames must be at most 64, got 65"),
        ({"actions": "fly"}, "actions", "unknown action 'fly'"),
        ({"actions": None}, "actions", "expected 5 actions, one for each generated frame, got 0"),
        ({"strategy": "k=7"}, "strategy", "row_lag must be in [1, width=5], got 7"),
        ({"context_frames": 8}, "context_frames", "context_frames=8 leaves no room for a frame"),
        ({"clip": "%"}, "clip", "clip is not base64"),
        ({"clip": "AAAA"}, "clip", "expected a PNG, JPEG"),
        ({"fps": 3}, "fps", "fps: Unexpected keyword argument"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(served, clip, settings, param, message):
    answer = served.post(VIDEOS, json={**asked_for(clip), **settings})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_form_that_is_none_is_refused(served):
    headers = {"content-type": "multipart/form-data; boundary=b"}
    for body in (b"--b\r\nx", b"--c", b""):
        answer = served.post(VIDEOS, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            400,
            "invalid_request_error",
        )


def test_models_of_images_and_of_videos_say_what_to_ask(served, serve, clip):
    answer = served.post(json={"prompt": "left"})
    assert "this model makes videos: use /v1/videos/continuations" in answer.text
    answer = serve().post(VIDEOS, json=asked_for(clip))
    assert "this model makes images: use /v1/images/generations" in answer.text
