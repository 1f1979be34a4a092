"""runs/engine_stage.py: an engine that has nothing of diagd but a plan writes the same tokens."""

from typing import Any

import pytest
import torch
from transformers import GlmImageForConditionalGeneration, LlamaConfig, LlamaForCausalLM

import diagd
from diagd.decoding.schedule import FrameFormat
from diagd.models.rotary import shared_coordinates
from runs.engine_stage import write
from tests.models.test_glm_image import CODES, FOLDER, GOLDEN, prompt_of

PREVIEW, PICTURE = FrameFormat(3, 4), FrameFormat(6, 8)


def plan(frame, row_lag, row_start: Any = "temporal", before=None):
    schedule = diagd.Diagonal(row_lag, row_start=row_start).schedule(frame.grid)
    return diagd.make_plan(schedule, frame.layout(1, before=before), pad=False).as_data()


@pytest.mark.parametrize("row_lag", [1, 3])
def test_a_plain_llama_writes_what_our_engine_writes(row_lag):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    llama, prompt = LlamaForCausalLM(config).eval(), torch.arange(5, 12)
    written = write(llama, prompt, [plan(FrameFormat(3, 5), row_lag)], 40)
    out = diagd.generate_tokens(
        diagd.HuggingFaceModel(llama),
        prompt[None],
        diagd.DiagonalSchedule(diagd.TokenGrid(1, 3, 5), row_lag),
        context_frames=0,
        sampling=diagd.SamplingOptions(valid_range=(0, 40)),
    )
    assert torch.equal(written, out.tokens.flatten())


@pytest.mark.parametrize("row_start", ["temporal", "predecessor", "spatial"])
@pytest.mark.parametrize("row_lag", [1, 2])
def test_plain_glm_image_writes_preview_and_picture(row_lag, row_start):
    theirs = GlmImageForConditionalGeneration.from_pretrained(FOLDER / "vision_language_encoder")
    prompt, _, _ = prompt_of("t2i")
    start = len(prompt)
    sections = [diagd.Section(start, PREVIEW, 1), diagd.Section(start + 12, PICTURE, 1)]
    plans = [plan(PREVIEW, row_lag, row_start), plan(PICTURE, row_lag, row_start, PREVIEW)]
    turned = write(
        theirs, prompt, plans, CODES, lambda places: shared_coordinates(places, sections)[:, None]
    )
    assert torch.equal(turned, GOLDEN[f"t2i.k{row_lag}.{row_start}.tokens"])


def test_the_command_tells_what_a_plan_is(command):
    given = "plan", "--grid", "1x6x8", "-k", 2, "--before", "3x4", "--lanes", "--json"
    document = command(*given).document
    assert document["num_steps"] == len(document["steps"]) == 18
    expected = plan(PICTURE, 2, before=PREVIEW)
    assert {name: document[name] for name in expected} == expected
    step = document["steps"][2]
    # row 0 goes on from its own token; row 1 begins with the preview's at (1, 0), scaled
    assert step == {"positions": [1, 7], "inputs": [1, -12], "outputs": [2, 8]}
    refused = command("plan", "--grid", "1x6x8", "--before", "3", "--lanes")
    refused.assert_refused(r"before must look like HEIGHTxWIDTH \(for example 16x16\), got '3'")
