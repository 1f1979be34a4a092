import pytest

from diagd.models.config import PRESETS, ModelConfig
from tests.worlds import HEIGHT, WIDTH, model_config

KEYS = {
    *("schedule", "steps", "seconds", "seconds_min", "seconds_max", "ms_per_step"),
    *("tokens_per_second", "frames_per_second", "speedup", "step_ratio", "efficiency"),
    *("warm_up_seconds", "tokens_equal_to_raster"),
}
TINY_1D = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 30,
    "image_vocab_size": 24,
    "max_positions": 64,
    "grid_height": 3,
    "grid_width": 5,
    "num_action_tokens": 2,
}


@pytest.fixture
def bench(command, monkeypatch):
    """Run `diagd bench` on a preset that exists in this test only."""
    monkeypatch.setenv("COLUMNS", "140")  # a terminal that is wide enough for the table

    def run(*flags, **changes):
        monkeypatch.setitem(PRESETS, "tiny", ModelConfig(**{**TINY_1D, **changes}))
        return command("bench", "--model", "tiny", "--repeats", 1, *flags, "--json")

    return run


def rows_of(outcome):
    assert outcome.code == 0, outcome.err
    return {row["schedule"]: row for row in outcome.document["rows"]}


def test_every_schedule_is_a_row_with_all_its_numbers(bench):
    outcome = bench("--grid", "2x3x5", "--row-lag", 1, 2)
    rows = rows_of(outcome)
    assert {"hugging face", "raster", "row_lag 1", "row_lag 2"} <= set(rows)
    assert {name: row["steps"] for name, row in rows.items() if "raster" not in name} == {
        "hugging face": 30,
        "row_lag 1": 2 * 7,
        "row_lag 2": 2 * 9,
    }
    for row in rows.values():
        assert set(row) == KEYS
        assert row["seconds_min"] <= row["seconds"] <= row["seconds_max"]
        assert row["step_ratio"] == 30 / row["steps"]
        assert row["tokens_per_second"] == pytest.approx(30 / row["seconds"])
        assert row["frames_per_second"] == pytest.approx(2 / row["seconds"])
        assert row["ms_per_step"] == pytest.approx(row["seconds"] / row["steps"] * 1000)
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["step_ratio"])
    assert 1.0 in {rows[name]["speedup"] for name in rows if name.startswith("raster")}
    for name in ("efficiency", "ms/step", "row_lag 2", "hugging face"):
        assert name in outcome.out


def test_the_report_says_what_was_run_on_what(bench):
    document = bench("--grid", "2x3x5", "--seed", 4).document
    assert document["grid"] == [2, 3, 5]
    assert (document["options"]["seed"], document["options"]["repeats"]) == (4, 1)
    assert (document["device"], document["threads"]) == ("cpu", 1)
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
        {"tie_embeddings": True, "num_kv_heads": 4},
    ],
    ids=["rope, actions", "no actions", "rope3d", "tied"],
)
def test_greedy_raster_writes_the_tokens_of_hugging_face(changes, bench):
    rows = rows_of(bench("--grid", "2x3x5", "--row-lag", 1, 5, **changes))
    equal = {name: row["tokens_equal_to_raster"] for name, row in rows.items()}
    assert {name: share for name, share in equal.items() if name != "row_lag 1"} == dict.fromkeys(
        equal.keys() - {"row_lag 1"}, 1.0
    )
    assert equal["row_lag 1"] < 1


def test_the_grid_is_two_frames_of_the_model_s_by_default(bench):
    outcome = bench("--row-lag", 3)
    assert outcome.document["grid"] == [2, 3, 5]
    assert rows_of(outcome)["row_lag 3"]["steps"] == 2 * 11


def test_without_a_baseline_there_is_no_hugging_face(bench):
    rows = rows_of(bench("--baseline", "none", "--no-pack"))
    assert set(rows) == {"raster", "row_lag 1", "row_lag 2", "row_lag 4"}


def test_other_precisions_run(bench):
    rows = rows_of(bench("--dtype", "bfloat16", "--row-lag", 1))
    assert rows["row_lag 1"]["seconds"] > 0


def test_a_checkpoint_folder_can_be_timed(command, world):
    outcome = command("bench", "--model", world, "--row-lag", 1, "--repeats", 1, "--json")
    assert outcome.document["grid"] == [2, HEIGHT, WIDTH]
    assert rows_of(outcome)["hugging face"]["tokens_equal_to_raster"] == 1
    assert model_config().max_positions > 3 * (HEIGHT * WIDTH + 1)


def test_biases_and_steeper_rotations_are_handed_to_hugging_face(bench):
    rows = rows_of(bench("--grid", "2x3x5", position="rope3d", rope_step=3.0, bias=True))
    assert rows["hugging face"]["tokens_equal_to_raster"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned", "norm": "layer", "mlp": "gelu", "bias": True},
        {"qk_norm": True},
    ],
    ids=["WHAM", "Cosmos"],
)
def test_a_model_that_is_no_llama_has_no_baseline(changes, bench):
    refused = bench("--grid", "2x3x5", **changes)
    refused.assert_refused("only LLaMA-like models have a Hugging Face LLaMA: use --baseline none")
    rows = rows_of(bench("--grid", "2x3x5", "--baseline", "none", **changes))
    assert rows["row_lag 1"]["steps"] == 14


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--grid", "2x3"), r"grid must look like TxHxW \(for example 3x40x64\), got '2x3'"),
        (("--row-lag", 0), r"row_lag must be in \[1, width=5\], got 0"),
        (("--row-lag", 2, 6), r"row_lag must be in \[1, width=5\], got 6"),
        (("--repeats", 0), r"repeats must be at least 1, got 0"),
        (("--compile", "--cuda-graph"), r"compile and cuda_graph exclude each other"),
        (("--cuda-graph",), r"cuda.*graph"),
        (("--baseline", "vllm"), r"'hf'"),
        (("--dtype", "float16"), r"float16"),
        (("--grid", "4x3x5"), r"prompt and grid take 83 of 64 positions"),
    ],
)
def test_bad_flags_are_refused(flags, message, bench):
    bench(*flags).assert_refused(message)


def test_an_unknown_model_is_refused(command):
    command("bench", "--model", "nowhere").assert_refused("no model at 'nowhere'")
