import json

import numpy as np
import pytest

from diagd.evaluation.results import appending, key_of, pack, read_results, unpack, video_path
from tests.evaluation.lines import clip_line, run_line, write_lines


def test_lines_come_back_as_runs_and_clips(tmp_path):
    lines = run_line(), clip_line("raster", "a", (20.0, 21.0)), run_line(run=1)
    results = read_results(write_lines(tmp_path / "results.jsonl", *lines))
    assert results.runs == [lines[0], lines[2]]
    assert results.clips == [lines[1]]
    assert [key_of(record) for record in results.clips] == [("tiny", "raster", "a")]


def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_writer(tmp_path):
    path = write_lines(tmp_path / "results.jsonl", run_line(), clip_line("raster", "a"))
    whole = path.read_bytes()
    torn = json.dumps(clip_line("raster", "b")).encode()
    for cut in (1, len(torn) // 2, len(torn)):
        path.write_bytes(whole + torn[:cut])
        assert [record["clip"] for record in read_results(path).clips] == ["a"]
    path.write_bytes(whole + b"\n\n" + torn)
    with appending(path) as append:
        assert path.read_bytes() == whole
        append(clip_line("raster", "c"))
    assert [record["clip"] for record in read_results(path).clips] == ["a", "c"]


def test_a_new_file_and_one_torn_in_its_first_line_start_empty(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "ru')
    with appending(path):
        assert read_results(path).runs == read_results(path).clips == []
    with appending(tmp_path / "new.jsonl"):
        assert (tmp_path / "new.jsonl").read_bytes() == b""


def test_one_process_writes_at_a_time(tmp_path):
    path = tmp_path / "results.jsonl"
    with (
        appending(path),
        pytest.raises(ValueError, match=r"results.jsonl is being written by another process"),
        appending(path),
    ):
        pass
    with appending(path) as append:  # free again
        append(run_line())
    assert len(read_results(path).runs) == 1


def test_no_number_that_json_does_not_know_is_written(tmp_path):
    with (
        appending(tmp_path / "results.jsonl") as append,
        pytest.raises(ValueError, match="JSON"),
    ):
        append({"kind": "run", "psnr": float("nan")})
    assert (tmp_path / "results.jsonl").read_bytes() == b""


OTHER_LINES = {
    "expected a line of diagd evaluate": ("{}", '{"kind": "clip", "model": "tiny"}'),
    "expected a JSON object": ("[]", "3", "no JSON"),
}


@pytest.mark.parametrize(
    ("line", "message"), [(line, words) for words, lines in OTHER_LINES.items() for line in lines]
)
def test_a_strange_line_is_named(line, message, tmp_path):
    path = write_lines(tmp_path / "results.jsonl", run_line())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=rf"results\.jsonl:2: {message}"):
        read_results(path)


def test_a_clip_that_is_there_twice_is_named(tmp_path):
    path = write_lines(tmp_path / "r.jsonl", run_line(), *[clip_line("k=1", "a")] * 2)
    with pytest.raises(ValueError, match=r"r\.jsonl:3: tiny k=1 a is there twice"):
        read_results(path)


@pytest.mark.parametrize("runs", [[], [run_line("another")]])
def test_a_clip_whose_run_is_missing_is_named(runs, tmp_path):
    path = write_lines(tmp_path / "r.jsonl", *runs, clip_line("k=1", "a"))
    with pytest.raises(ValueError, match=rf"r\.jsonl:{len(runs) + 1}: the line of its run is miss"):
        read_results(path)


@pytest.mark.parametrize("name", ["settings", "metrics", "models", "tokenizer", "commit", "python"])
def test_a_run_line_of_another_version_is_named(name, tmp_path):
    line = run_line()
    del line[name]
    path = write_lines(tmp_path / "r.jsonl", line, clip_line("k=1", "a"))
    message = rf"r\.jsonl:1: expected a line of diagd evaluate of this version, with '{name}'"
    with pytest.raises(ValueError, match=message):
        read_results(path)


def test_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="results not found"):
        read_results(tmp_path / "results.jsonl")


def test_arrays_survive_packing_bit_by_bit():
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    packed = json.loads(json.dumps(pack(values)))
    assert np.array_equal(unpack(packed), values)


@pytest.mark.parametrize(("largest", "kind"), [(2**15 - 1, "int16"), (2**15, "int32")])
def test_tokens_are_packed_as_narrow_as_they_fit(largest, kind):
    values = np.array([[0, 7, largest], [3, 2, 1]])
    packed = json.loads(json.dumps(pack(values)))
    assert set(packed) == {"shape", kind}
    assert np.array_equal(unpack(packed), values)


def test_any_name_makes_a_path_inside_the_folder():
    assert video_path("doom", "k=1,d=24", "clip_7") == "videos/doom/k=1,d=24/clip_7.mp4"
    strange = video_path("../up/ft model", "k=1/predecessor", "a/b")
    assert strange == "videos/_up_ft_model-c8b5bcfe/k=1_predecessor-dcdb9142/a_b-07f4401c.mp4"


def test_names_that_look_alike_are_files_of_their_own():
    names = ["a/b", "a_b", "a b", ".a_b", "a:b"]
    assert len({video_path("doom", "k=1", name) for name in names}) == len(names)
