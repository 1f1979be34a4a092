"""runs/adapters_report.py on made-up results of runs/arms.py."""

import json

import pytest

from runs.adapters_report import Options, main

NLL = {  # by arm and seed: raster, k=1 and k=2
    ("untouched", 0): (2.0, 2.2, 2.1),
    ("full-50", 0): (2.01, 2.1, 2.05),
    ("rank16-50", 0): (2.0, 2.12, 2.06),
    ("rank16-50", 1): (2.0, 2.14, 2.06),
}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results" / "maze" / "adapters"
    folder.mkdir(parents=True)
    for (arm, seed), nll in NLL.items():
        write(folder, arm, seed, nll)
    return tmp_path / "results"


def write(folder, arm, seed, nll):
    about = {"arm": arm, "seed": seed, "trained": 5 * (arm != "untouched"), "parameters": 100}
    about |= {"clips": 2, "device": "a processor", "torch": "2"}
    rows = (
        about | {"strategy": strategy, "nll": value}
        for strategy, value in zip(("raster", "k=1", "k=2"), nll, strict=True)
    )
    (folder / f"{arm}-{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_shares_are_of_what_all_weights_change_in_as_many_steps(results, tmp_path):
    main(Options(results, tmp_path / "out"))
    text = (tmp_path / "out" / "adapters.md").read_text()
    assert "| untouched | 0 | 0 (0.0%) | 1 | +0.0000 | +0.2000 | +0.1000 |" in text
    assert "| full | 50 | 5 (5.0%) | 1 | +0.0100 | +0.1000 (100%) | +0.0500 (100%) |" in text
    k1, k2 = "+0.1300 ± 0.0141 (70%)", "+0.0600 ± 0.0000 (80%)"
    assert f"| rank16 | 50 | 5 (5.0%) | 2 | +0.0000 ± 0.0000 | {k1} | {k2} |" in text
    assert json.loads((tmp_path / "out" / "maze.json").read_text())[0]["arm"] == "untouched"
    assert (tmp_path / "out" / "adapters.png").stat().st_size > 1000


def test_no_share_is_given_of_a_change_within_its_error(results, tmp_path):
    write(results / "maze" / "adapters", "full-50", 1, (2.01, 2.1, 2.13))
    main(Options(results, tmp_path / "out"))
    text = (tmp_path / "out" / "adapters.md").read_text()
    k1, k2 = "+0.1000 ± 0.0000 (100%)", "+0.0900 ± 0.0566"
    assert f"| full | 50 | 5 (5.0%) | 2 | +0.0100 ± 0.0000 | {k1} | {k2} |" in text
    assert "+0.1300 ± 0.0141 (70%) | +0.0600 ± 0.0000 |" in text


def test_results_without_the_untouched_world_are_refused(results, tmp_path):
    (results / "maze" / "adapters" / "untouched-0.jsonl").unlink()
    with pytest.raises(ValueError, match="has no results of the arm untouched"):
        main(Options(results, tmp_path / "out"))
