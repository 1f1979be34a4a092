import pytest

from diagd.data.recorders.recording import RecordOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clips": 0}, "clips must be at least 1, got 0"),
        ({"frames": 0}, "frames must be at least 1, got 0"),
        ({"repeat": 0}, "repeat must be at least 1, got 0"),
        ({"skip": -1}, "skip must be at least 0, got -1"),
        ({"first_seed": -1}, "first_seed must be at least 0, got -1"),
        (
            {"size": "64"},
            r"size must be height x width .*, multiples of 16 and at least 16, got '64'",
        ),
        ({"size": "100x96"}, "multiples of 16 and at least 16, got '100x96'"),
        ({"size": "64x0"}, "multiples of 16 and at least 16, got '64x0'"),
        ({"actions": "game:ACTIONS"}, r"--actions is only for Gymnasium environments \(--gym ID\)"),
        ({"gym": "Game-v0", "scenario": "my_way_home"}, "--scenario is only for ViZDoom"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        RecordOptions(out=tmp_path, **changes)
