"""GLM-Image's class of transformers: two grids of unlike sizes, and positions in three numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GlmImageForConditionalGeneration

import diagd
from diagd.backends.prepare import prepare
from diagd.decoding.engine import Batch
from diagd.decoding.visibility import Seen
from diagd.models.rotary import shared_coordinates

FOLDER = Path(__file__).parents[1] / "fixtures" / "glm_image_tiny"
GOLDEN = load_file(FOLDER / "golden.safetensors")
CASES = "t2i", "odd", "i2i", "i2i2"
START, END, CODES = 64, 65, 64
GREEDY = diagd.SamplingOptions(valid_range=(0, CODES))
WRITTEN = [
    name for name in GOLDEN if (name.endswith(".tokens") and ".k" in name) or ".raster." in name
]


@pytest.fixture(scope="module")
def theirs():
    return GlmImageForConditionalGeneration.from_pretrained(FOLDER / "vision_language_encoder")


@pytest.fixture(scope="module")
def model(theirs):
    return diagd.HuggingFaceModel(theirs)


def prepared(backend, int8=False, dtype=torch.float32):
    own = diagd.load_model(FOLDER / "vision_language_encoder", dtype=dtype)
    return prepare(own, backend, int8)[0]


@pytest.fixture(scope="module", params=["transformers", "eager", "native"])
def either(request, model):
    """Its class, or our own decoder around the same weights."""
    return model if request.param == "transformers" else prepared(request.param)


def prompt_of(case):
    """Return the prompt, the sections of its source pictures, and the grids to be written."""
    prompt, sizes = GOLDEN[f"{case}.prompt_ids"], GOLDEN[f"{case}.image_grid_thw"][:, 1:].tolist()
    formats = [diagd.FrameFormat(*size) for size in sizes]
    count = int((prompt == END).sum())
    starts = ((prompt == START).nonzero()[:count, 0] + 1).tolist()
    sources = [diagd.Section(*one, 1) for one in zip(starts, formats[:count], strict=True)]
    return prompt, sources, formats[count:][::-1]


def grids_of(model, cases, strategy, *settings, **named):
    prompts, sources, formats = zip(*map(prompt_of, cases), strict=True)
    return diagd.generate_grids(
        model, prompts, formats, strategy, *settings, sections=sources, **named
    )


def flat(grids):
    return torch.cat([grid.flatten() for grid in grids])


@pytest.mark.parametrize("name", WRITTEN)
def test_diagonals_write_what_passes_without_a_cache_write(either, name):
    case, kind, *rest = name.removesuffix(".tokens").split(".")
    strategy = kind if kind == "raster" else f"k={kind[1]}/{rest[0]}"
    out = grids_of(either, [case], strategy, GREEDY, read_again="reread" in rest)
    assert torch.equal(flat(out.tokens[0]), GOLDEN[name])


@pytest.mark.parametrize("case", CASES)
def test_exact_decoding_writes_raster(either, case):
    out = grids_of(either, [case], "exact,lanes=8", GREEDY)
    assert torch.equal(flat(out.tokens[0]), GOLDEN[f"{case}.raster.tokens"])


@pytest.mark.parametrize("case", CASES)
def test_sections_give_the_positions_of_its_class(case):
    expected, (prompt, sections, formats) = GOLDEN[f"{case}.position_ids"], prompt_of(case)
    start = len(prompt)
    for frame in formats:
        sections.append(diagd.Section(start, frame, 1))
        start = sections[-1].end
    assert torch.equal(shared_coordinates(torch.arange(start + 1), sections), expected)


@torch.inference_mode()
def logits_of(model, case):
    """Return those of one pass over the prompt and the golden's tokens."""
    prompt, sources, formats = prompt_of(case)
    tokens = torch.cat([prompt, GOLDEN[f"{case}.raster.tokens"]])[None]
    stream = Batch(model, 1, 99).admit(formats[0])
    stream.read(prompt, 0, sources)
    for frame in formats[1:]:
        stream.num_used += stream.frame.one.num_slots
        stream.go_on_with(frame)
    slots = torch.arange(tokens.shape[1])
    turns = stream.coordinates(slots[None])
    cache = model.make_cache(1, len(slots) + 1)
    given = slots[None], slots, Seen(slots, slots, slots, slots), cache
    return model.forward(tokens, *given, coordinates=turns)[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_one_pass_of_its_class(either, case):
    # sums of float32 in another order; the two likeliest ids are 0.0075 apart at least
    logits = logits_of(either, case)
    torch.testing.assert_close(logits, GOLDEN[f"{case}.logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize(("int8", "allowed"), [(False, 0.04), (True, 0.15)])
@pytest.mark.parametrize("case", CASES)
def test_narrow_weights_of_our_kernels_write_raster_exactly(case, int8, allowed):
    """Of the weights' own rounding random norms make 2% of the logits in bfloat16, 5% in int8."""
    narrow = prepared("native", int8, torch.float32 if int8 else torch.bfloat16)
    expected = GOLDEN[f"{case}.logits"]
    assert (logits_of(narrow, case) - expected).std() < allowed * expected.std()
    out = [grids_of(narrow, [case], name, GREEDY).tokens[0] for name in ("raster", "exact,lanes=8")]
    assert torch.equal(*map(flat, out))


@pytest.mark.parametrize("case", ["t2i", "i2i"])
def test_raster_is_what_generate_writes_and_neither_disturbs_the_other(theirs, model, case):
    prompt, _, formats = prompt_of(case)
    count = sum(frame.one.num_slots for frame in formats)
    others = list(range(CODES, theirs.config.text_config.vision_vocab_size))

    def generated():
        return theirs.generate(
            prompt[None],
            image_grid_thw=GOLDEN[f"{case}.image_grid_thw"],
            max_new_tokens=count,
            do_sample=False,
            suppress_tokens=others,
        )[0, len(prompt) :]

    assert torch.equal(generated(), GOLDEN[f"{case}.raster.tokens"])
    before = model.logits(prompt[None])  # as it has positions of another sequence
    out = grids_of(model, ["odd"], "raster", GREEDY)
    assert torch.equal(flat(out.tokens[0]), GOLDEN["odd.raster.tokens"])
    assert torch.equal(model.logits(prompt[None]), before)
    assert torch.equal(generated(), GOLDEN[f"{case}.raster.tokens"])


@pytest.mark.parametrize("strategy", ["k=1", "k=2/predecessor", "exact,lanes=6"])
def test_prompts_and_grids_of_unlike_sizes_share_a_batch(either, strategy):
    sampling = diagd.SamplingOptions(0.9, top_p=0.75, valid_range=(0, CODES))
    seen = list[int]()
    together = grids_of(either, CASES, strategy, sampling, 5, on_grid=seen.append)
    for row, case in enumerate(CASES):
        alone = grids_of(either, [case], strategy, sampling, 5 + row)
        for grid, expected in zip(together.tokens[row], alone.tokens[0], strict=True):
            assert torch.equal(grid, expected)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_steps_are_those_of_both_grids(model):
    out = grids_of(model, ["t2i"], "k=1", GREEDY)
    assert out.stats.num_steps == (2 + 4) + (5 + 8)
    assert grids_of(model, ["odd"], "k=2", GREEDY).stats.num_steps == (3 * 2 + 3) + (6 * 2 + 5)


def test_ids_that_are_no_codes_are_never_drawn(model):
    """Unrestricted, its own `generate` draws some in three of the four cases."""
    assert sum(int((GOLDEN[f"{case}.free.tokens"] >= CODES).sum()) > 1 for case in CASES)
    assert model.image_range == (0, CODES)
    assert (model.vocab_size, model.num_embeddings) == (72, 136)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"formats": [[]]}, "formats must be some for each of 1 prompts, got 1"),
        ({"formats": []}, "formats must be some for each of 1 prompts, got 0"),
        ({"sections": []}, "sections must be some for each of 1 prompts, got 0"),
        ({"strategy": "k=5"}, r"row_lag must be in \[1, width=4\], got 5"),
        (
            {"prompts": [torch.tensor([90, 91])]},
            r"must end with the image start, id 64, got \[91\]",
        ),
        ({"formats": [[diagd.FrameFormat(20, 30)]]}, "take 615 tokens, the context holds 512"),
        ({"formats": [[diagd.FrameFormat(2, 3, 1)]]}, "grids stand without conditioning tokens"),
    ],
)
def test_what_does_not_fit_is_refused(model, change, message):
    prompt, _, formats = prompt_of("t2i")
    given = {"prompts": [prompt], "formats": [formats], "strategy": "k=1"} | change
    with pytest.raises(ValueError, match=message):
        diagd.generate_grids(model, **given)


def test_a_checkpoint_without_its_config_is_refused(tmp_path):
    shutil.copy(
        FOLDER / "vision_language_encoder" / "model.safetensors", tmp_path / "a.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"GLM-Image checkpoint: expected a config\.json beside it"
    ):
        diagd.load_model(tmp_path / "a.safetensors")


def test_a_share_that_sections_do_not_rotate_is_refused(tmp_path):
    folder = shutil.copytree(FOLDER / "vision_language_encoder", tmp_path / "stage")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 1.0
    (folder / "config.json").write_text(json.dumps(config))
    message = r"partial_rotary_factor must rotate 16 of 32 numbers of a head, .*, got 1\.0"
    with pytest.raises(ValueError, match=message):
        diagd.load_model(folder)
