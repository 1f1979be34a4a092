import pytest
import torch

from diagd.backends.webgpu.model import WebGPUModel
from diagd.benchmark import steps
from diagd.benchmark.steps import linear_parameters, slots_read
from diagd.families.presets import PRESETS
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.system import cpu_name, git_commit
from tests.backends.webgpu.adapter import device
from tests.models.tiny import KINDS, tiny_fields, tiny_model
from tests.worlds import HEIGHT, WIDTH, model_config

KEYS = {
    *("dtype", "backend", "strategy", "context_frames", "steps"),
    *("seconds", "seconds_min", "seconds_max"),
    *("ms_per_step", "tokens_per_second", "frames_per_second", "over_hugging_face", "speedup"),
    *("fed_per_token", "step_ratio", "efficiency", "warm_up_seconds", "tokens_equal_to_raster"),
    *("capture_seconds", "disturbed"),
}
LIMITS = {
    *("step_ms", "megabytes_per_step", "megaflops_per_step", "bandwidth_share", "flops_share"),
    *("parts_ms", "attention"),
}
TINY_1D = tiny_fields(hidden_size=32, intermediate_size=48, vocab_size=30, image_vocab_size=24)


@pytest.fixture
def bench(command, monkeypatch):
    """Run `diagd bench` on a preset that exists in this test only."""
    monkeypatch.setenv("COLUMNS", "120")  # a terminal that is wide enough for the table
    monkeypatch.setattr(steps, "_STREAM_NUMBERS", 2**16)
    monkeypatch.setitem(steps._MATRIX_SIZE, "cpu", 64)

    def run(*flags, **changes):
        monkeypatch.setitem(PRESETS, "tiny", ModelConfig(**{**TINY_1D, **changes}))
        return command("bench", "--model", "tiny", "--repeats", 1, *flags, "--json")

    return run


def rows_of(outcome):
    assert outcome.code == 0, outcome.err
    return {row["strategy"]: row for row in outcome.document["rows"]}


def test_a_model_of_images_goes_on_from_nothing(bench):
    image = {"position": "rope2d", "num_action_tokens": 1, "max_positions": 16}
    rows = rows_of(bench("--row-lag", 1, **image))
    assert {row["context_frames"] for row in rows.values()} == {0}
    assert {name: row["steps"] for name, row in rows.items()} == {
        "hugging face": 15,
        "raster": 15,
        "k=1": 7,
    }
    assert rows["hugging face"]["tokens_equal_to_raster"] == 1.0


def test_every_schedule_is_a_row_with_all_its_numbers(bench):
    outcome = bench("--grid", "2x3x5", "--row-lag", 1, 2)
    rows = rows_of(outcome)
    assert {"hugging face", "raster", "k=1", "k=2"} <= set(rows)
    assert {name: row["steps"] for name, row in rows.items() if "raster" not in name} == {
        "hugging face": 30,
        "k=1": 2 * 7,
        "k=2": 2 * 9,
    }
    for row in rows.values():
        assert set(row) == (KEYS if row["strategy"] == "hugging face" else KEYS | LIMITS)
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["step_ratio"] == 30 / row["steps"]
        assert row["tokens_per_second"] == pytest.approx(30 / row["seconds"])
        assert row["frames_per_second"] == pytest.approx(2 / row["seconds"])
        assert row["ms_per_step"] == pytest.approx(row["seconds"] / row["steps"] * 1000)
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["step_ratio"])
        assert row["over_hugging_face"] == rows["hugging face"]["seconds"] / row["seconds"]
    assert rows["raster"]["speedup"] == rows["hugging face"]["over_hugging_face"] == 1
    for name in ("efficiency", "ms/step", "k=2", "hugging face"):
        assert name in outcome.said


def test_steps_whose_weights_stay_in_caches_are_compared_with_those(bench, monkeypatch):
    rates = {}

    def read_rate(device, num_bytes):
        return rates.setdefault(num_bytes, 1e15)  # nothing is faster

    monkeypatch.setattr(steps, "read_rate", read_rate)
    for row in rows_of(bench("--grid", "2x3x5", "--row-lag", 1)).values():
        if row["strategy"] != "hugging face":
            assert 0 < row["bandwidth_share"] < 0.01
            assert round(row["megabytes_per_step"] * 1e6) in rates


def test_the_report_says_what_was_run_on_what(bench):
    document = bench("--grid", "2x3x5", "--seed", 4).document
    assert document["grid"] == [2, 3, 5]
    assert (document["options"]["seed"], document["options"]["repeats"]) == (4, 1)
    assert (document["device"], document["threads"]) == (cpu_name(), 1)
    assert document["commit"] == git_commit()
    assert document["parameters"] == (
        2 * 30 * 32  # embedding, output
        + 32  # final norm
        + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)  # norms, q o, k v, MLP
    )
    assert document["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_action_tokens": 0, "image_vocab_size": 30},
        {"position": "rope3d"},
        {"position": "rope3d", "rope_step": 3.0, "bias": True},
        {"tie_embeddings": True, "num_kv_heads": 4},
    ],
    ids=["rope, actions", "no actions", "rope3d", "steeper rotations, biases", "tied"],
)
def test_greedy_raster_writes_the_tokens_of_hugging_face(changes, bench):
    rows = rows_of(bench("--grid", "2x3x5", "--row-lag", 1, 5, **changes))
    equal = {name: row["tokens_equal_to_raster"] for name, row in rows.items()}
    assert {name: share for name, share in equal.items() if name != "k=1"} == dict.fromkeys(
        equal.keys() - {"k=1"}, 1.0
    )


def test_the_grid_is_two_frames_of_the_model_s_by_default(bench):
    outcome = bench("--row-lag", 3)
    assert outcome.document["grid"] == [2, 3, 5]
    assert rows_of(outcome)["k=3"]["steps"] == 2 * 11
    assert bench("--row-lag", 3, max_positions=40).document["grid"] == [1, 3, 5]  # after another


def test_a_context_that_is_full_is_timed_beside_an_empty_one(bench):
    outcome = bench("-k", 1, max_positions=99)  # 2 + 17 * 5 fit, of which 2 frames are generated
    rows = outcome.document["rows"]
    names = ["hugging face", *["hugging face"], *["raster", "k=1"] * 2]
    assert [row["strategy"] for row in rows] == names
    assert [row["context_frames"] for row in rows] == [1, 3, 1, 1, 3, 3]
    for row in rows:
        (raster,) = (
            other
            for other in rows
            if (other["strategy"], other["context_frames"]) == ("raster", row["context_frames"])
        )
        assert row["speedup"] == raster["seconds"] / row["seconds"]
        assert (row["strategy"] == "k=1") == (row["tokens_equal_to_raster"] < 1)
    assert rows[4]["megabytes_per_step"] > rows[2]["megabytes_per_step"]
    assert "k=1 after 3" in outcome.said
    rows = bench("-k", 1, "--context-frames", 2, max_positions=99).document["rows"]
    assert {row["context_frames"] for row in rows} == {2}


def test_without_a_baseline_there_is_no_hugging_face(bench):
    rows = rows_of(bench("--baseline", "none"))
    assert set(rows) == {"raster", "k=1", "k=2", "k=4"}
    assert {row["over_hugging_face"] for row in rows.values()} == {None}


def test_dtypes_and_backends_stand_in_one_table(bench):
    flags = "--dtype", "float32", "int8", "--backend", "native", "eager", "-k", 1
    refused = bench(*flags)
    refused.assert_refused("int8 needs backend native or webgpu on the cpu, got eager")
    outcome = bench("--dtype", "float32", "bfloat16", *flags[3:])
    rows = outcome.document["rows"]
    lines = [(row["dtype"], row["backend"], row["strategy"]) for row in rows]
    ours = [(b, s) for b in ("native", "eager") for s in ("raster", "k=1")]
    assert lines == [
        (dtype, *line)
        for dtype in ("float32", "bfloat16")
        for line in (("", "hugging face"), *ours)
    ]
    for row in rows:
        rasters = [
            other["seconds"]
            for other in rows
            if other["strategy"] == "raster"
            and other["dtype"] == row["dtype"]
            and row["backend"] in ("", other["backend"])
        ]
        assert row["speedup"] == min(rasters) / row["seconds"]
    assert all(row["tokens_equal_to_raster"] == 1 for row in rows[:2])


def test_int8_is_compared_with_float32_of_hugging_face(bench):
    rows = bench("--dtype", "float32", "int8", "-k", 1).document["rows"]
    assert rows[-1]["dtype"] == "int8"
    assert rows[-1]["over_hugging_face"] == rows[0]["seconds"] / rows[-1]["seconds"]


def test_the_parts_of_a_step_make_up_the_step(bench):
    for backend in ("native", "eager"):
        row = rows_of(bench("--backend", backend, "--baseline", "none", "-k", 2))["k=2"]
        parts, step = row["parts_ms"], row["step_ms"]
        assert step["min"] <= step["p50"] <= step["p99"] <= step["max"]
        whole = parts["forward"] + parts["sampling"] + parts["bookkeeping"]
        assert whole <= row["ms_per_step"]
        assert ("linears" in parts) == (backend == "native")
        assert row["attention"] == (backend if backend == "native" else "flash_attention")
        assert row["capture_seconds"] == 0
        if backend == "native":
            assert 0 < parts["linears"] + parts["attention"] < parts["forward"]


@pytest.mark.parametrize("name", ["cosmos-5b", "iris", "janus-pro-1b", "mc-ar-300m", "wham-200m"])
def test_the_weights_counted_are_those_that_a_step_multiplies_with(name):
    config = PRESETS[name]
    with torch.device("meta"):
        model = Transformer(config)
    once = ("cross_attn.k_proj", "cross_attn.v_proj")  # of a text, before the first step
    modules = {name: one for name, one in model.named_modules() if not name.endswith(once)}
    linears = [one.weight for one in modules.values() if isinstance(one, torch.nn.Linear)]
    if config.tie_embeddings:
        linears.append(model.model.embed_tokens.weight)
    assert linear_parameters(config) == sum(weight.numel() for weight in linears)


def test_sliding_layers_read_no_more_than_their_window():
    config = tiny_model(**KINDS["sliding"]).config  # one of two layers, 11 positions
    assert [slots_read(config, slots) for slots in (5, 11, 31)] == [5, 11, 21]
    assert slots_read(tiny_model().config, 31) == 31


def test_bytes_and_flops_are_counted_from_the_shapes(bench):
    flags = "--grid", "1x3x5", "--baseline", "none", "-k", 5, "--context-frames", 1
    row = rows_of(bench(*flags))["raster"]
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 32 * 30
    prompt, actions, cells = 15, 2, 15
    # a step reads what stands up to its last lane; the first feeds a true token and the actions
    slots = [prompt + actions + cell for cell in range(cells)]
    lanes = [1 + actions] + [1] * (cells - 1)
    megabytes = (weights * cells + 2 * 2 * 2 * 8 * sum(slots)) * 4 / cells / 1e6
    assert row["megabytes_per_step"] == pytest.approx(megabytes)
    pairs = sum(a * b for a, b in zip(lanes, slots, strict=True))
    megaflops = (2 * weights * sum(lanes) + 4 * 2 * 4 * 8 * pairs) / cells / 1e6
    assert row["megaflops_per_step"] == pytest.approx(megaflops)


def test_a_checkpoint_folder_can_be_timed(command, world):
    outcome = command("bench", "--model", world, "--row-lag", 1, "--repeats", 1, "--json")
    assert outcome.document["grid"] == [2, HEIGHT, WIDTH]
    assert rows_of(outcome)["hugging face"]["tokens_equal_to_raster"] == 1
    assert model_config().max_positions > 3 * (HEIGHT * WIDTH + 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
        {"qk_norm": True},
        {"sliding_window": 20, "sliding_layers": (1,)},
    ],
    ids=["WHAM", "Cosmos", "doom"],
)
def test_a_model_that_is_no_llama_has_no_baseline(changes, bench):
    refused = bench("--grid", "2x3x5", "--baseline", "hf", **changes)
    refused.assert_refused("baseline hf needs a LLaMA-like model: use --baseline none")
    outcome = bench("--grid", "2x3x5", **changes)
    assert "no Hugging Face baseline: no model like tiny there" in outcome.said
    rows = rows_of(outcome)
    assert rows["k=1"]["steps"] == 14
    assert "hugging face" not in rows


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", 5, "--baseline", "hf"), r"steps needs --baseline none: only our own steps"),
        (("--row-lag", 2, 6), r"row_lag must be in \[1, width=5\], got 6"),
        (("--repeats", 0), r"repeats must be at least 1, got 0"),
        (("--backend", "cuda-graph"), r"backend cuda-graph needs --device cuda"),
        (("--backend", "fast"), r"'native'"),
        (("--baseline", "vllm"), r"'hf'"),
        (("--backend", "native", "--dtype", "float16"), r"native needs a model on the cpu in .*16"),
        (("--strategy", "diagonal"), r"strategy must look like raster, k=2,"),
        (("--strategy", "zipar=6"), r"row_lag must be in \[1, width=5\], got 6"),
        (
            ("--temperature", 1, "--baseline", "hf"),
            r"temperature needs --baseline none: the baseline hf is greedy",
        ),
        (("--temperature", -1, "--baseline", "none"), r"temperature must be 0 or more, got -1"),
        (
            ("--strategy", "exact", "--steps", 5, "--baseline", "none"),
            r"steps must be left out: exact needs every step",
        ),
        (
            ("--quick", "--backend", "native", "webgpu"),
            "cannot time webgpu, which runs whole frames",
        ),
        (("--grid", "4x3x5"), r"prompt and grid need 83 of 64 positions"),
    ],
)
def test_bad_flags_are_refused(flags, message, bench):
    bench(*flags).assert_refused(message)


def test_a_sample_of_the_steps_stands_for_all(command, monkeypatch):
    """Overlapping frames after two context frames and a text, as Cosmos; every third step runs."""
    changes = {
        **{"position": "rope3d", "context_size": 6, "prefix_length": 1, "position_table": True},
        **{"num_action_tokens": 0, "max_positions": 62, "vocab_size": 24, "extra_embeddings": 2},
    }
    monkeypatch.setitem(PRESETS, "tiny-text", ModelConfig(**{**TINY_1D, **changes}))
    monkeypatch.setattr(steps, "_STREAM_NUMBERS", 2**16)
    outcome = command(
        *("bench", "--model", "tiny-text", "--grid", "2x3x5", "--context-frames", 2, "-k", 2),
        *("--overlap", "--steps", 5, "--baseline", "none", "--repeats", 1, "--json"),
    )
    raster, diagonal = outcome.document["rows"]
    assert (raster["steps"], diagonal["steps"]) == (30, 6 + 4 + 5)
    step_ms = raster["step_ms"]
    assert step_ms["min"] * 30 <= raster["seconds"] * 1000 <= step_ms["max"] * 30


def test_other_strategies_stand_in_the_same_table(bench):
    """The parts of a step stay its parts, with an engine for each strategy."""
    names = "exact,lanes=8", "jacobi", "k=1/spatial", "zipar=2", "exact,lanes=8"
    outcome = bench("-k", 2, "--baseline", "none", "--backend", "native", "--strategy", *names)
    rows = rows_of(outcome)
    assert [*rows] == ["raster", "k=2", *names[:4]]
    for name in ("raster", "exact,lanes=8", "jacobi"):
        assert rows[name]["tokens_equal_to_raster"] == 1
    assert rows["exact,lanes=8"]["steps"] < rows["raster"]["steps"] == 30
    assert rows["exact,lanes=8"]["fed_per_token"] > 1
    assert rows["raster"]["fed_per_token"] == (30 + 2 * 2) / 30  # two actions before each frame
    for row in rows.values():
        assert set(row) == KEYS | LIMITS
        assert row["ms_per_step"] == pytest.approx(row["seconds"] / row["steps"] * 1000)
        parts = row["parts_ms"]
        assert 0 < parts["linears"] + parts["attention"] < parts["forward"]
        assert parts["sampling"] > 0
    for word in ("exact,lanes=8", "fed/token", "= raster", "float32 native"):
        assert word in outcome.said


def test_strategies_can_be_sampled(bench):
    flags = "--baseline", "none", "-k", 2, "--temperature", 1
    rows = rows_of(bench(*flags, "--strategy", "exact,lanes=8"))
    equal = {name: row["tokens_equal_to_raster"] for name, row in rows.items()}
    assert equal["raster"] == equal["exact,lanes=8"] == 1
    cut = bench(*flags, "--top-p", 0.3, "--strategy", "exact,lanes=8")
    assert rows_of(cut)["exact,lanes=8"]["steps"] != rows["exact,lanes=8"]["steps"]


def test_webgpu_runs_frames_in_one_submission_each_and_knows_no_time_of_a_step(bench, monkeypatch):
    device()
    submitted = []
    original = WebGPUModel.submit

    def counting(self, cache, batch):
        submitted.append(len(batch.tasks))
        original(self, cache, batch)

    monkeypatch.setattr("diagd.backends.webgpu.model.TILES", (4,))  # of which one is compiled
    monkeypatch.setattr(WebGPUModel, "submit", counting)
    outcome = bench("--backend", "webgpu", "--baseline", "none", "-k", 2, "--context-frames", 1)
    rows = rows_of(outcome)
    assert {name: set(row) for name, row in rows.items()} == {"raster": KEYS, "k=2": KEYS}
    # a warm-up and a repeat: a prompt, and two frames of 3 x 5 tokens
    assert sorted(submitted) == sorted([1, 15, 15] * 2 + [1, 9, 9] * 2)
    assert "speed (float32 webgpu)" in outcome.said
    assert "limits" not in outcome.said


def test_quick_is_raster_and_k_1_by_some_steps_and_rows_are_shown_as_they_come(bench):
    outcome = bench("--quick")
    assert list(rows_of(outcome)) == ["raster", "k=1"]
    assert outcome.document["options"]["steps"] == 30
    shown = [outcome.err.index(f"{name} after 1: ") for name in ("raster", "k=1")]
    assert shown == sorted(shown)
    assert "frames/s in its first run" in outcome.err
    bench("--quick", "--strategy", "exact").assert_refused(
        "steps must be left out: exact needs every step"
    )
