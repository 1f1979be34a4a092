"""runs/speed_report.py on files of benchmarks, older and newer ones."""

import json

from runs import speed_report
from tests.benchmark.test_disturbance import DISTURBED, QUIET


def test_strategies_have_one_spelling_and_disturbed_rows_a_mark(tmp_path):
    rows = (DISTURBED, QUIET | {"strategy": "k=2"}, QUIET | {"strategy": "exact,lanes=32"})
    document = {
        "options": {"model": "doom", "repeats": 3},
        **{"parameters": 8e6, "device": "a machine", "threads": 2, "torch": "2.13"},
        **{"grid": [2, 14, 24], "ceilings": {}},
        "rows": [row | {"frames_per_second": 2.0} for row in rows],
    }
    (tmp_path / "bench_cpu.jsonl").write_text(json.dumps(document) + "\n")
    speed_report.main(speed_report.Options(tmp_path))
    text = (tmp_path / "speed.md").read_text()
    assert text.count("| float32 native k=4 ! |") == 2
    assert text.count("| float32 native k=2 |") == 2
    assert text.count("| float32 native exact,lanes=32 |") == 2
    assert text.count("! disturbed: float32 native k=4 (") == 1
    assert (tmp_path / "speed_cpu.png").is_file()
