from dataclasses import replace

import pytest

from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Diagonal, Raster
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.families.checkpoints import load_model
from diagd.training import tuning
from diagd.training.sequences import windows
from diagd.training.tuning import TuneOptions, list_candidates, tune
from tests.worlds import clips_of, write_shard, write_shard_model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a function that makes options for a tiny model and its clips."""
    folder = tmp_path_factory.mktemp("tune")
    model = str(write_shard_model(folder / "model"))
    tokens = write_shard(folder / "tokens", clips_of())

    def make(**changes):
        plain = {"model": model, "tokens": tokens, "clips": 3, "frames": 4, "row_lag": (1, 2)}
        return TuneOptions(**{**plain, **changes})

    return make


def test_the_document_holds_the_gap_of_every_candidate(data):
    options = data(row_start=("temporal", "spatial"), context_frames=2)
    document = tune(options)
    names = [(row["name"], row["row_start"], row["num_steps"]) for row in document["rows"]]
    assert names == [
        ("raster", "", 12),
        *[("k=1", "temporal", 8), ("k=1/spatial", "spatial", 8)],
        *[("k=2", "temporal", 10), ("k=2/spatial", "spatial", 10)],
    ]
    model = load_model(options.model)
    clips = windows(clips_of(), 3, 4)
    raster = strategy_nll(model, *clips, Raster(), context_frames=2)
    for row in document["rows"]:
        strategy = Diagonal(row["row_lag"], row["frame_lag"], row["row_start"] or "temporal")
        nll = strategy_nll(model, *clips, strategy, context_frames=2)
        gap = nll - raster
        assert row["nll"] == pytest.approx(nll.mean().item(), abs=1e-5)
        assert row["gap"] == pytest.approx(gap.mean().item(), abs=1e-5)
        error = gap.mean((1, 2, 3)).std().item() / 3**0.5
        assert row["gap_error"] == pytest.approx(error, abs=1e-5)
        for axis, others in (("frame", (0, 2, 3)), ("row", (0, 1, 3)), ("column", (0, 1, 2))):
            assert row[f"gap_by_{axis}"] == pytest.approx(gap.mean(others).tolist(), abs=1e-5)


def costs(monkeypatch, gaps):
    """Replace the costs of strategies, in nats a token, by row lag (3 is raster)."""

    def nll(model, tokens, actions, strategy, context_frames):
        gap = gaps[getattr(strategy, "row_lag", 3)]
        gap += 0.001 * len(getattr(strategy, "row_start", "temporal"))
        return tokens[:, context_frames:].float() * 0 + gap

    monkeypatch.setattr(tuning, "strategy_nll", nll)


@pytest.mark.parametrize(
    ("tolerance", "choice"), [(0.0, "raster"), (0.05, "k=2/spatial"), (0.5, "k=1/spatial")]
)
def test_the_fastest_within_the_tolerance_is_chosen(tolerance, choice, data, monkeypatch):
    costs(monkeypatch, {1: 0.2, 2: 0.03, 3: 0.0})
    document = tune(data(tolerance=tolerance, row_start=("predecessor", "temporal", "spatial")))
    assert document["choice"]["name"] == choice  # spatial is the cheapest of the three
    frontier = [(row["name"], row["row_start"]) for row in document["rows"] if row["frontier"]]
    assert frontier == [("raster", ""), ("k=1/spatial", "spatial"), ("k=2/spatial", "spatial")]


def test_against_another_model_nothing_may_be_affordable(data, monkeypatch, tmp_path):
    baseline = str(write_shard_model(tmp_path / "baseline"))
    own = tune(data(baseline=baseline))
    assert [row["gap"] for row in own["rows"]] == [row["gap"] for row in tune(data())["rows"]]
    seen = []

    def nll(model, tokens, actions, strategy, context_frames):
        seen.append(model)
        return tokens[:, context_frames:].float() * 0 + (model is seen[0])

    monkeypatch.setattr(tuning, "strategy_nll", nll)
    document = tune(data(baseline=baseline))
    assert document["choice"] is None
    assert {row["gap"] for row in document["rows"]} == {1.0}


def test_frames_overlap_where_actions_are_known_ahead(data):
    grid = TokenGrid(3, 4, 7)
    options = data(row_lag=(1, 7), overlap=True, row_start=("temporal",))
    found = [(c.name, c.schedule(grid).frame_lag) for c in list_candidates(options, grid)]
    assert found == [
        ("raster", 28),
        *[("k=1", 10), ("k=1,d=4", 4), ("k=1,d=2", 2), ("k=1,d=1", 1)],
        *[("k=7,d=14", 14), ("k=7,d=7", 7)],
    ]
    default = list_candidates(data(row_lag=(), row_start=("temporal",)), grid)
    assert [candidate.name for candidate in default] == ["raster", "k=1", "k=2", "k=4"]


def test_candidates_can_be_named(data):
    document = tune(data(row_lag=(), strategy=("k=1,d=2/predecessor zipar=2", "raster", "k=2")))
    found = [(row["name"], row["frame_lag"], row["row_start"]) for row in document["rows"]]
    assert found == [
        ("raster", 6, ""),
        *[("k=1,d=2/predecessor", 2, "predecessor"), ("zipar=2", 5, "spatial")],
        ("k=2", 5, "temporal"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tolerance": -1.0}, r"tolerance must be at least 0, got -1.0"),
        ({"tolerance": float("nan")}, r"tolerance must be at least 0, got nan"),
        ({"context_frames": 0}, r"context_frames must be at least 1, got 0"),
        ({"clips": 0}, r"clips must be at least 1, got 0"),
        ({"row_start": ()}, r"row_start must not be empty"),
        ({"row_start": ("raster",)}, r"row_start must be one of .*, got 'raster'"),
        ({"strategy": ("k=1",)}, r"row_lag, overlap and row_start must be left out with strategy"),
        ({"strategy": ("exact",), "row_lag": ()}, r"strategy must have a schedule, got exact"),
        ({"strategy": ("k1",), "row_lag": ()}, r"strategy must look like raster, k=2,"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message, data):
    with pytest.raises(ValueError, match=message):
        data(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clips": 5}, r"clips must be in \[1, 4\], got 5"),
        ({"frames": 7}, r"frames must be in \[context_frames \+ 1=2, 6\], .* got 7"),
        ({"frames": 1}, r"frames must be in \[context_frames \+ 1=2, 6\], .* got 1"),
        ({"row_lag": (4,)}, r"row_lag must be in \[1, width=3\], got 4"),
        ({"row_lag": (), "strategy": ("k=4",)}, r"row_lag must be in \[1, width=3\], got 4"),
        ({"device": "cuda:99"}, r"device 'cuda:99' is not available"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(changes, message, data):
    with pytest.raises(ValueError, match=message):
        tune(data(**changes))


def test_clips_of_another_kind_are_refused(data, tmp_path, world):
    message = r"clips do not match .*world\d*: grid is \(2, 3\), the model's \(3,"
    with pytest.raises(ValueError, match=message):
        tune(data(model=str(world)))
    other = replace(clips_of(), action_names=("a", "b", "c"))
    tokens = write_shard(tmp_path / "other", other)
    with pytest.raises(ValueError, match=r"actions is \('a', 'b', 'c'\), the model's \('none', "):
        tune(data(tokens=tokens))
