"""The same text in Chromium, on SwiftShader: another compiler (Tint), the limits of browsers."""

import base64
from pathlib import Path

import pytest
import torch

from diagd.backends.webgpu.model import WebGPUModel, tile_of
from diagd.backends.webgpu.shader import OWN, SHARED, TILES, UNIFORM, bytes_of, weights_of
from diagd.decoding.sampling_options import SamplingOptions
from tests.backends.webgpu.adapter import on_webgpu
from tests.backends.webgpu.test_model import decode
from tests.browser import ON_CPU, open_browser
from tests.models.tiny import KINDS, tiny_model


@pytest.fixture(scope="module")
def page():
    """Open an empty page in a browser with WebGPU on its CPU, or skip the test."""
    with open_browser(*ON_CPU) as browser:
        page = browser.new_page()
        page.route("**/*", lambda route: route.fulfill(body="<p>", content_type="text/html"))
        page.goto("http://localhost/")  # WebGPU is for secure origins
        yield page


def base64_of(data):
    return base64.b64encode(data).decode()


def described(model, batch):
    """Describe a submission for `replay.js`."""
    last = batch.tasks[-1]
    start = batch.capacity * (model.row_floats - model.vocab_size)
    kept = last.rows // last.lanes * last.keep
    return {
        "records": base64_of(batch.records()),
        "lanes": base64_of(bytes_of(batch.lanes)),
        "memory": base64_of(bytes_of(batch.memory)),
        "arena": 4 * batch.capacity * model.row_floats,
        "tokens": last.held,
        "logits": [4 * start, 4 * kept * model.vocab_size],
        "steps": [
            [
                [*model.codes].index(tile_of(task.rows)),
                [
                    [entry, weights, *groups]
                    for entry, weights, groups in model.dispatches(task, batch.draws)
                ],
            ]
            for task in batch.tasks
        ],
    }


@pytest.mark.parametrize(
    ("kind", "sampling", "tiles"),
    [
        ("world", SamplingOptions(1.0, top_p=0.9), (4,)),
        pytest.param("cosmos", SamplingOptions(), TILES, marks=pytest.mark.slow),
        pytest.param("wham", SamplingOptions(0.8, top_k=9), TILES, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_what_python_submits_gives_the_same_tokens_and_logits(
    page, monkeypatch, kind, sampling, tiles
):
    monkeypatch.setattr("diagd.backends.webgpu.model.TILES", tiles)
    plain, submitted, tokens = tiny_model(**KINDS[kind]), [], []
    model = on_webgpu(plain)
    assert isinstance(model, WebGPUModel)
    submit = model.submit

    def note(cache, batch):
        submit(cache, batch)
        submitted.append(batch)
        tokens.append(cache.read("memory", torch.int32, 0, batch.tasks[0].held).tolist())
        caches[:] = [layer.size for layer in cache.layers]
        start = batch.capacity * (model.row_floats - model.vocab_size)
        logits[:] = [cache.read("arena", torch.float32, start, model.vocab_size)]

    caches, logits = [], []
    monkeypatch.setattr(model, "submit", note)
    decode(model, "k=1", sampling, num_frames=2)
    given = {
        "shared": list(SHARED.values()),
        "own": list(OWN.values()),
        "uniform": UNIFORM,
        "codes": [*model.codes.values()],
        "caches": caches,
        "weights": [
            [name, int(name.partition(" ")[2] or 0), *(base64_of(bytes_of(one)) for one in of)]
            for name, of in weights_of(plain, plain.dtype).items()
        ],
        "submissions": [described(model, batch) for batch in submitted],
    }
    replayed = page.evaluate(Path(__file__).with_name("replay.js").read_text(), given)
    if "missing" in replayed:
        pytest.skip("NO WEBGPU IN THE BROWSER: Chromium has no adapter")
    assert replayed["error"] is None
    assert replayed["tokens"] == tokens
    there = torch.tensor(replayed["logits"])[: model.vocab_size]
    assert (there - logits[0]).abs().max() <= 1e-5 * logits[0].abs().max()
