"""Images by OpenAI's own client: those that the model makes alone, and what is said of mistakes."""

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from diagd.decoding.sampling import SamplingOptions
from diagd.pipeline.generator import VideoGenerator
from tests.models.architectures import architecture
from tests.models.test_image_models import janus_processor
from tests.web.serve.serving import pixels_of
from tests.worlds import HEIGHT, PATCH_PX, WIDTH

WAYS = [
    {},
    {"strategy": "raster", "guidance": 1.0},
    {"strategy": "k=2", "temperature": 0.7, "top_k": 9, "top_p": 0.8, "guidance": 3.5},
    {"strategy": "exact", "temperature": 0.0},
]


def alone(world, prompt, count=1, seed=0, strategy="k=1", guidance=None, **sampling):
    """Return what `generate` makes, (count, H_px, W_px, 3)."""
    rules = {"temperature": 1.0, "top_p": 0.95, **sampling} if sampling else None
    if rules and not rules["temperature"]:
        rules = {}
    options = None if rules is None else SamplingOptions(**rules)
    how = {"strategy": strategy, "guidance": guidance, "sampling": options, "seed": seed}
    videos = world.generate([None] * count, [prompt] * count, 1, **how)
    return torch.cat([video.frames for video in videos])


def received(answer):
    return torch.stack([pixels_of(base64.b64decode(one.b64_json)) for one in answer.data])


def test_images_of_many_at_once_are_those_that_each_is_alone(served, image_model):
    """Of several clients, in ways of their own, which share the steps of one batch."""
    client = served.client()
    requests = [(way, prompt) for way in WAYS for prompt in ("left", "right")]

    def ask(number):
        way, prompt = requests[number]
        return client.images.generate(prompt=prompt, n=2, extra_body={"seed": number, **way})

    before = served.metric("diagd_steps_total")
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(ask, range(len(requests))))
    for number, ((way, prompt), answer) in enumerate(zip(requests, answers, strict=True)):
        expected = alone(image_model, prompt, 2, number, **way)
        assert torch.equal(received(answer), expected), way
        assert (answer.size, answer.output_format) == ("40x24", "png")
        assert answer.usage.output_tokens == 2 * HEIGHT * WIDTH
        assert answer.data[1].seed == number + 1
    assert served.metric("diagd_steps_total") > before


def test_a_text_makes_the_image_that_it_makes_alone(serve, tmp_path):
    architecture("janus").save_pretrained(tmp_path)
    janus_processor().save_pretrained(tmp_path)
    served = serve(tmp_path, max_prompt_tokens=60)
    world = VideoGenerator.from_pretrained(tmp_path, dtype="float32")
    client, texts = served.client(), ("a b", "b c d a")
    with ThreadPoolExecutor(2) as pool:
        asked = {"extra_body": {"seed": 5}}
        answers = list(pool.map(lambda text: client.images.generate(prompt=text, **asked), texts))
    for text, answer in zip(texts, answers, strict=True):
        assert torch.equal(received(answer), world.generate(text=text, seed=5).frames)
        ids = world.read_text(text)
        assert ids is not None
        assert answer.usage.input_tokens == ids.prompt.shape[1]
    with pytest.raises(openai.BadRequestError, match=r"prompt takes \d+ tokens, at most 60 are"):
        client.images.generate(prompt="a " * 60)


@pytest.mark.parametrize("strategy", ["k=1", "raster", "exact"])
def test_an_image_is_seen_while_it_is_written(served, image_model, strategy):
    """What is written is final, and the rest is grey."""
    asked = {"stream": True, "partial_images": 3, "extra_body": {"seed": 1, "strategy": strategy}}
    *previews, last = served.client().images.generate(prompt="forward", **asked)
    final = pixels_of(base64.b64decode(last.b64_json))
    assert last.type == "image_generation.completed"
    assert torch.equal(final, alone(image_model, "forward", seed=1, strategy=strategy)[0])
    assert [one.partial_image_index for one in previews] == list(range(len(previews)))
    shares = []
    for one in previews:
        assert one.type == "image_generation.partial_image"
        tokens = pixels_of(base64.b64decode(one.b64_json)).unfold(0, PATCH_PX, PATCH_PX)
        tokens = tokens.unfold(1, PATCH_PX, PATCH_PX)
        assert tokens.shape[:2] == (HEIGHT, WIDTH)
        is_grey = (tokens == 128).flatten(2).all(-1)
        assert not is_grey[0, 0]
        shares.append(1 - is_grey.float().mean().item())
    assert shares == sorted(shares)
    assert all(0 < share < 1 for share in shares)
    assert previews or strategy == "exact"  # which may be whole after a step or two


def test_pictures_can_be_fetched_by_address_in_other_formats(served, image_model):
    client = served.client()
    for kind in ("png", "jpeg", "webp"):
        asked = {"response_format": "url", "output_format": kind, "extra_body": {"seed": 3}}
        (one,) = client.images.generate(prompt="left", **asked).data
        answer = httpx.get(one.url)
        assert answer.headers["content-type"] == f"image/{kind}"
        found, expected = pixels_of(answer.content), alone(image_model, "left", seed=3)[0]
        assert found.shape == expected.shape
        assert torch.equal(found, expected) or kind != "png"
    gone = httpx.get(one.url[:-9])
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")


def test_an_image_is_drawn_anew_unless_a_seed_is_given(served):
    client = served.client()
    one, other = (client.images.generate(prompt="left").data[0].seed for _ in range(2))
    assert one != other


def test_models_are_listed(served):
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny-images"]
    assert client.models.retrieve("tiny-images").owned_by == "diagd"
    with pytest.raises(openai.NotFoundError, match="no model 'dall-e', expected tiny-images") as no:
        client.images.generate(prompt="left", model="dall-e")
    assert (no.value.code, no.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"prompt": "dog"}, "prompt", "unknown action 'dog'"),
        ({"size": "24x40"}, "size", "size must be auto or 40x24, got 24x40"),
        ({"strategy": "k=9"}, "strategy", r"row_lag must be in \[1, width=5\], got 9"),
        ({"strategy": "best"}, "strategy", "strategy must look like raster, k=2"),
        ({"temperature": 0, "top_k": 3}, None, "need a temperature above 0"),
        ({"n": 11}, "n", "n: Input should be less than or equal to 10"),
        ({"prompt": ""}, "prompt", "prompt: String should have at least 1 character"),
        ({"guidance": float("inf")}, "guidance", "guidance: Input should be a finite number"),
        ({"dream": True}, "dream", "dream: Unexpected keyword argument"),
        ({"quality": "hd"}, "quality", "quality: Input should be 'auto' or 'standard'"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(served, asked, param, message):
    text = json.dumps({"prompt": "left", **asked}).replace("Infinity", "1e999")
    answer = served.post(content=text)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"] == param
    assert re.search(message, error["message"])
