"""Two processes with the model behind one server, one of which is killed in the middle of load."""

import base64
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch

from tests.web.play.serving import wait_until
from tests.web.replicas import NEEDS_RAY_SERVE, replicas_of
from tests.web.serve.serving import IMAGES, pixels_of

pytestmark = NEEDS_RAY_SERVE


@pytest.fixture
def url(spawn, images):
    """Serve with two replicas; returns the address and the process."""
    flags = "--port", 0, "--dtype", "float32", "--replicas", 2, "--replica-cpus", 0.5
    process = spawn("-m", "diagd", "serve", "--model", images, *flags)
    line = next(line for line in iter(process.stdout.readline, "") if "http://" in line)
    url = line.split(" at ")[1].split("/v1")[0]
    end = time.monotonic() + 300  # Ray takes long to start on a busy machine
    while httpx.get(f"{url}/health").json() == {"status": "loading"}:
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return url, process


def test_a_replica_that_is_killed_costs_nobody_an_answer(url, image_model):
    url, process = url
    first = replicas_of(process)
    assert len(first) == 2

    def ask(seed):
        asked = {"prompt": "left", "seed": seed, "strategy": "raster", "n": 2}
        asked["stream"] = seed % 3 == 0
        answer = httpx.post(url + IMAGES, json=asked, timeout=120)
        if asked["stream"]:
            lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
            documents = [json.loads(line[6:]) for line in lines]
            return [one.get("b64_json") for one in documents]
        assert answer.status_code == 200, answer.text
        return [one["b64_json"] for one in answer.json()["data"]]

    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(ask, seed) for seed in range(60)]
        wait_until(lambda: pending[10].done())
        os.kill(first[0].pid, signal.SIGKILL)
        answers = [one.result() for one in pending]
    broken = [seed for seed, answer in enumerate(answers) if len(answer) != 2 or None in answer]
    assert all(seed % 3 == 0 for seed in broken)  # which were told of an error after an event
    for seed in {*range(5), 59} - {*broken}:
        world = image_model.generate([None] * 2, ["left"] * 2, 1, strategy="raster", seed=seed)
        pictures = [pixels_of(base64.b64decode(one)) for one in answers[seed]]
        expected = [video.frames[0] for video in world]
        found = {one.numpy().tobytes() for one in pictures}
        assert found == {one.numpy().tobytes() for one in expected}
        assert all(isinstance(one, torch.Tensor) for one in pictures)
    # and it comes back
    wait_until(lambda: len({one.pid for one in replicas_of(process)} - {first[0].pid}) == 2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    psutil.wait_procs(first, timeout=30)
    assert not any(one.is_running() for one in first)
