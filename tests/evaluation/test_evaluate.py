import json
import re
import shutil

import pytest
import torch

import diagd
from diagd.backends import prepare
from diagd.data.video import read_video
from diagd.decoding.teacher_forcing import strategy_nll
from diagd.evaluation.evaluate import choose_clips
from diagd.evaluation.meters import Meter, clips_after
from diagd.evaluation.results import BASELINES, read_results, unpack
from diagd.families.clip_files import find_clips
from diagd.metrics.perceptual import short_sha256
from diagd.metrics.quality import psnr
from diagd.pipeline.generator import VideoGenerator
from tests.backends.candidates import BFLOAT16, FLOAT32, candidates_of
from tests.evaluation.lines import write_clips
from tests.metrics.detectors import write_detector
from tests.metrics.test_lpips import random_weights

SHORT = ("--num-clips", 2, "--frames", 5, "--context-frames", 2, "--backend", "native")
SCHEDULES = ("--strategy", "raster k=2", "k=1")
STRATEGIES_OF_A_CLIP = [*BASELINES, "raster", "k=2", "k=1"]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("data") / "clips", count=3)


@pytest.fixture
def evaluate(command, world, clips, tmp_path):
    """Run the command on the little world."""

    def run(*flags):
        base = ("--model", world, "--clips", clips, "--out", tmp_path / "out")
        return command("evaluate", *base, *SHORT, *SCHEDULES, *flags, "--json")

    return run


def lines_of(folder):
    """Return clip lines by key, without what differs from run to run."""
    results = read_results(folder / "results.jsonl")
    kept = ("quality", "features", "tokens", "promise", "seed", "frame_size_px")
    return {(r["strategy"], r["clip"]): {name: r.get(name) for name in kept} for r in results.clips}


def test_every_clip_is_measured_under_every_schedule_and_baseline(evaluate, tmp_path, world):
    outcome = evaluate()
    assert outcome.code == 0, outcome.err
    document = outcome.document
    results = read_results(tmp_path / "out" / "results.jsonl")
    names = sorted({record["clip"] for record in results.clips})
    assert len(names) == 2
    assert [(r["clip"], r["strategy"]) for r in results.clips] == [
        (clip, method) for clip in names for method in STRATEGIES_OF_A_CLIP
    ]
    assert [row["strategy"] for row in document["rows"]] == [
        *("raster", "k=2", "k=1", "copy", "reconstruction")
    ]
    assert document["measured"] == 2 * len(STRATEGIES_OF_A_CLIP)
    assert [row["num_steps"] for row in document["rows"][:3]] == [45, 27, 21]
    (run,) = results.runs
    assert set(run) >= {"commit", "device", "torch", "settings", "options", "models", "metrics"}
    assert run["options"]["seed"] == 0
    assert "k=2" in outcome.said
    assert "PSNR" in outcome.said


def test_a_folder_of_fewer_clips_than_the_protocol_has_is_taken_whole(
    command, world, clips, tmp_path
):
    lengths = "--frames", 4, "--context-frames", 2, "--backend", "native", "--strategy", "k=1"
    paths = "--model", world, "--clips", clips, "--out", tmp_path / "out"
    outcome = command("evaluate", *paths, *lengths, "--json")
    assert outcome.code == 0, outcome.err
    note = f"all 3 clips of {clips}: the protocol mc-ar has 100"
    assert outcome.document["notes"][0] == note
    assert f"note: {note}" in outcome.said
    assert len({r["clip"] for r in read_results(tmp_path / "out" / "results.jsonl").clips}) == 3


def test_a_killed_run_goes_on_where_it_was(evaluate, tmp_path, monkeypatch):
    evaluate()
    whole = lines_of(tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:40])  # killed while it wrote the fifth clip
    measured = []
    original = Meter.__call__

    def counting(self, task):
        measured.append(task)
        return original(self, task)

    monkeypatch.setattr(Meter, "__call__", counting)
    outcome = evaluate()
    assert outcome.document["measured"] == len(measured) == len(whole) - 4
    assert lines_of(tmp_path / "out") == whole
    assert path.read_bytes().startswith(b"".join(lines[:5]))
    results = read_results(path)
    assert [record["run"] for record in results.clips] == [0] * 4 + [1] * (len(whole) - 4)
    measured.clear()
    assert evaluate().document["measured"] == 0
    assert measured == []
    assert len(read_results(path).runs) == 2  # nothing to do leaves no line


def test_what_auto_was_when_results_began_it_stays(command, world, clips, tmp_path, monkeypatch):
    base = ("--model", world, "--clips", clips, "--out", tmp_path, *SHORT[:-2], "--dtype", "auto")
    for costs, strategy in ((BFLOAT16, "k=2"), (FLOAT32, "k=1")):
        monkeypatch.setattr(
            prepare, "time_candidates", lambda _, costs=costs: candidates_of(*costs)
        )
        outcome = command("evaluate", *base, "--strategy", strategy, "--json")
        assert outcome.code == 0, outcome.err
    runs = read_results(tmp_path / "results.jsonl").runs
    chosen = [(run["settings"]["dtype"], *run["backends"].values()) for run in runs]
    assert chosen == 2 * [("bfloat16", "eager")]
    assert "dtype=bfloat16, now float32" in command("evaluate", *base[:-1], "float32").err


def test_schedules_clips_and_models_can_be_added_later(evaluate, tmp_path, world):
    evaluate()
    before = lines_of(tmp_path / "out")
    more = evaluate("--strategy", "k=2,d=4", "--num-clips", 3, "--models", world, f"copy={world}")
    assert more.document["measured"] == len(STRATEGIES_OF_A_CLIP) + 1 * 3 + 3 * 5 - 2
    after = read_results(tmp_path / "out" / "results.jsonl")
    assert {key: lines_of(tmp_path / "out")[key] for key in before} == before
    assert {r["model"] for r in after.clips} == {str(world), "copy"}


def test_schedules_share_a_clip_s_seed(evaluate, tmp_path):
    evaluate("--seed", 3)
    seeds = {}
    for (_, clip), record in lines_of(tmp_path / "out").items():
        seeds.setdefault(clip, set()).add(record["seed"])
    assert all(len(values) == 1 for values in seeds.values())
    assert len({value for values in seeds.values() for value in values}) == 2


def test_videos_are_kept_on_request_with_the_frames_that_were_measured(evaluate, tmp_path, clips):
    evaluate("--save-videos")
    results = read_results(tmp_path / "out" / "results.jsonl")
    paths = [tmp_path / "out" / record["video"] for record in results.clips]
    assert len(set(paths)) == len(paths) == len(list((tmp_path / "out").rglob("*.mp4")))
    (truth,) = (
        tmp_path / "out" / r["video"]
        for r in results.clips
        if (r["strategy"], r["clip"]) == ("truth", results.clips[0]["clip"])
    )
    stored = read_video(truth)
    source = read_video(clips / f"{results.clips[0]['clip']}.mp4").frames[2:5]
    assert (stored.fps, stored.frames.shape) == (8, source.shape)
    assert (stored.frames.float() - source.float()).abs().mean() < 8  # H.264 is lossy


def test_greedy_decoding_needs_no_truncation(evaluate, tmp_path):
    assert evaluate("--temperature", 0).code == 0
    (run,) = read_results(tmp_path / "out" / "results.jsonl").runs
    assert run["settings"]["sampling"]["temperature"] == 0


def test_fvd_is_in_the_table_with_its_warning(evaluate, world, tmp_path):
    clips = write_clips(tmp_path / "long", count=2, num_frames=12)
    detector = write_detector(tmp_path / "i3d.pt")
    flags = "--frames", 12, "--clips", clips, "--fvd-detector", detector, "--strategy", "k=1"
    document = evaluate(*flags).document
    assert document["rows"][0]["fvd"]["clips"] == 2
    notes = " ".join(document["notes"])
    assert f"FVD: resize crop, detector_sha256 {short_sha256(detector)}." in notes
    assert "FVD compares 2 generated with as many real clips of 10 frames" in notes
    assert "Warning: FVD of 2 samples in 9 dimensions" in notes
    assert "LPIPS: not measured" in notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--frames", 2), "frames must be at least 3, got 2"),
        (("--context-frames", 0), "context_frames must be at least 1, got 0"),
        (("--num-clips", 0), "num_clips must be at least 1, got 0"),
        (("--num-clips", 4), "expected a number of clips from 1 to 3, got 4"),
        (("--start", -1), "start must be at least 0, got -1"),
        (("--workers", 0), "workers must be at least 1, got 0"),
        (("--strategy", "k=0"), r"row_lag must be at least 1, got 0"),
        (("--strategy", "k=1,d=8"), r"frame_lag must be in \[1, .*=7\], got 8"),
        (("--strategy", "diagonal"), "strategy must look like raster, k=2,"),
        (("--strategy", "zipar=6"), r"row_lag must be in \[1, width=5\], got 6"),
        (("--strategy", "exact", "--teacher-forced"), "compares schedules: leave exact out"),
        (("--lpips-heads", "alex.pth"), "lpips_heads needs lpips_backbone as well"),
        (("--lpips-backbone", "absent.pth"), "file not found: absent.pth"),
        (("--fvd-detector", "absent.pt"), "FVD needs 10 or more generated frames, got 3"),
        (("--fvd-detector", "i3d"), "FVD needs 9 or more generated frames, got 3"),
        (
            ("--fvd-detector", "stlpips-alex", "--frames", 20),
            "must be i3d or a TorchScript, got st",
        ),
        (
            ("--fvd-detector", "i3d", "--fvd-resize", "detector", "--frames", 20),
            "must be crop or st",
        ),
        (
            ("--perceptual", "lpips"),
            "perceptual must be stlpips-alex or stlpips-vgg, or that with =F",
        ),
        (("--perceptual", "stlpips-vgg=absent.pth"), "file not found: absent.pth"),
        (("--efd-detector", "efficientnet-lite0"), "efd_detector is for images"),
        (("--models", "absent"), "no model at 'absent'"),
        (("--models", "a=doom", "a=doom"), "models must be distinct and at least one"),
        (("--protocol", "vpt"), "cosmos.*wham.*mc-ar"),
        (("--drift", "--teacher-forced"), "one mode at a time: .* teacher_forced, drift out"),
        (("--drift", "--fvd-detector", "absent.pt", "--frames", 20), "drift is measured frame by"),
        (("--revisit", 2), "revisit sets the number of frames: leave frames out"),
        (("--revisit", 0), "revisit must be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(flags, message, evaluate, tmp_path):
    evaluate(*flags).assert_refused(message)
    assert not (tmp_path / "out").exists()


def test_videos_are_not_saved_among_the_clips(evaluate, clips):
    outcome = evaluate("--save-videos", "--out", clips / "later" / "out")
    outcome.assert_refused("out must be outside of .*: saved videos would be clips of it")
    assert not (clips / "later").exists()


def test_a_clip_that_is_too_short_is_named_before_anything_is_measured(evaluate, tmp_path, clips):
    folder = shutil.copytree(clips, tmp_path / "mixed")
    evaluate("--num-clips", 3, "--clips", folder)
    before = lines_of(tmp_path / "out")
    evaluate(
        "--num-clips", 3, "--clips", folder, "--frames", 7, "--out", tmp_path / "two"
    ).assert_refused(r"clip_0\.mp4: expected at least 7 frames from frame 0 on, got 6")
    assert lines_of(tmp_path / "out") == before
    assert not (tmp_path / "two").exists()


def test_a_bad_clip_stops_no_other_and_is_tried_again(evaluate, tmp_path):
    """One is damaged where its frames are, one lacks its actions, one has an unknown action."""
    folder = write_clips(tmp_path / "mixed", count=5)
    names = "clip_1.mp4", "clip_3.jsonl", "clip_4.jsonl"
    good = {name: (folder / name).read_bytes() for name in names}
    data = good["clip_1.mp4"]
    start, end = data.index(b"mdat") + 4, data.index(b"moov")
    (folder / "clip_1.mp4").write_bytes(data[:start] + b"\xff" * (end - start) + data[end:])
    (folder / "clip_3.jsonl").unlink()
    (folder / "clip_4.jsonl").write_bytes(good["clip_4.jsonl"].replace(b"none", b"fly", 1))
    outcome = evaluate("--num-clips", 5, "--clips", folder)
    assert outcome.code == 1
    failed = outcome.document["failed"]
    assert set(failed) == {"clip_1", "clip_3", "clip_4"}
    assert outcome.document["measured"] == 2 * len(STRATEGIES_OF_A_CLIP)
    assert {clip for _, clip in lines_of(tmp_path / "out")} == {"clip_0", "clip_2"}
    for clip, why in failed.items():
        assert f"{clip} could not be measured: {why}" in outcome.said
    for name, content in good.items():
        (folder / name).write_bytes(content)
    outcome = evaluate("--num-clips", 5, "--clips", folder)
    assert (outcome.code, outcome.document["failed"]) == (0, {})
    assert outcome.document["measured"] == 3 * len(STRATEGIES_OF_A_CLIP)


def test_a_bad_clip_does_not_stop_the_likelihood_of_others(evaluate, tmp_path):
    folder = write_clips(tmp_path / "mixed", count=2)
    (folder / "clip_1.jsonl").write_text("no JSON\n")
    outcome = evaluate("--teacher-forced", "--clips", folder)
    assert (outcome.code, set(outcome.document["failed"])) == (1, {"clip_1"})
    assert {row["clips"] for row in outcome.document["rows"]} == {1}


def test_a_strategy_that_a_later_model_lacks_is_found_at_the_door(evaluate, world):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VideoGenerator, "check", lambda world, *_: seen.append(world))
        evaluate("--models", f"a={world}", f"b={world}", "--strategy", "k=1")
    assert len(set(map(id, seen))) == 2


def test_clips_of_the_same_names_from_elsewhere_are_not_mixed(evaluate, tmp_path, clips):
    evaluate()
    moved = shutil.copytree(clips, tmp_path / "moved")
    assert evaluate("--clips", moved).document["measured"] == 0
    for name in ("clip_0", "clip_1"):
        shutil.copy(moved / "clip_2.mp4", moved / f"{name}.mp4")
    evaluate("--clips", moved).assert_refused(r"was measured with clip clip_\d=[\w-]+, now [\w-]+")


def test_a_tokenizer_that_changed_in_its_folder_is_refused(evaluate, tmp_path, world):
    folder = shutil.copytree(world / "tokenizer", tmp_path / "tokenizer")
    evaluate("--tokenizer", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n\n")
    evaluate("--tokenizer", folder).assert_refused(r"was measured with tokenizer=\w+, now \w+")


OTHERWISE = [
    (("--seed", 1), "was measured with seed=0, now 1; choose another --out"),
    (("--context-frames", 1), "was measured with context_frames=2, now 1"),
    (("--temperature", 0.5), r"was measured with sampling=\{'temperature': 1.0,.*now"),
    (("--start", 1), "was measured with start=0, now 1"),
]


def test_lines_of_other_settings_are_never_mixed(evaluate, tmp_path):
    evaluate("--num-clips", 1)
    before = (tmp_path / "out" / "results.jsonl").read_bytes()
    for flags, message in OTHERWISE:
        evaluate(*flags).assert_refused(message)
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == before


def test_a_model_that_changed_under_its_label_is_refused(evaluate, tmp_path, world):
    evaluate("--models", f"tiny={world}")
    other = shutil.copytree(world, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config, indent=1))
    evaluate("--models", f"tiny={other}").assert_refused(
        r"was measured with model tiny=\w+, now \w+"
    )


def test_other_metric_weights_are_refused(evaluate, tmp_path):
    evaluate()
    torch.save(random_weights("alex"), tmp_path / "alexnet.pth")
    evaluate("--lpips-backbone", tmp_path / "alexnet.pth").assert_refused(
        "was measured with metrics=.*lpips"
    )


STRATEGIES = "exact exact,lanes=8 jacobi zipar=2"


def test_every_strategy_stands_beside_raster(evaluate, command, tmp_path):
    outcome = evaluate("--strategy", "k=1", STRATEGIES)
    assert outcome.code == 0, outcome.err
    lines = lines_of(tmp_path / "out")
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    assert set(rows) == {"raster", "k=1", *STRATEGIES.split(), "copy", "reconstruction"}
    for name in ("exact", "exact,lanes=8", "jacobi"):
        for clip in {clip for _, clip in lines}:
            assert lines[name, clip]["quality"] == lines["raster", clip]["quality"]
        assert rows[name]["equal_to_raster"] == 1
        assert rows[name]["num_steps"] < 45
        assert rows[name]["fed_per_token"] > 1
    assert 0 < rows["k=1"]["equal_to_raster"] < 1
    assert rows["copy"]["equal_to_raster"] is rows["copy"]["fed_per_token"] is None
    for word in ("fed/token", "= raster", "100.0%"):
        assert word in outcome.said
    report = tmp_path / "report"
    assert command("report", "--results", tmp_path / "out", "--out", report).code == 0
    text = (report / "report.md").read_text()
    assert "| tokens/s↑ | steps↓ | fed/token↓ | = raster |" in text
    assert re.search(r"\| exact,lanes=8 \| 2 \|.*\| 100\.0% \|", text)


def test_the_likelihood_of_true_frames_is_that_of_the_schedules(evaluate, tmp_path, world, clips):
    """Every strategy against one forward pass with its own mask; a second run measures nothing."""
    outcome = evaluate("--teacher-forced")
    assert outcome.code == 0, outcome.err
    path = tmp_path / "out" / "teacher_forced.jsonl"
    text = path.read_text()
    lines = read_results(path).clips
    assert {(line["strategy"]) for line in lines} == {"raster", "k=2", "k=1"}
    generator = VideoGenerator.from_pretrained(world, backend="native")
    for line in lines:
        clip = find_clips(clips, generator.vocabulary)[line["clip"]].read(5, 0, None, (24, 40))
        tokens = generator.tokenizer.encode(clip.frames)[None]
        actions = generator.action_ids(clip.actions, 5, "frame")
        strategy = diagd.parse_strategy(line["strategy"])
        assert strategy.has_schedule
        nll = strategy_nll(generator.model, tokens, actions, strategy, context_frames=2)
        assert line["nll"] == pytest.approx(nll.mean().item(), rel=1e-4)
        assert line["nll_by_column"] == pytest.approx(nll.mean((0, 1, 2)).tolist(), rel=1e-4)
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    assert rows["raster"]["gap"] == 0
    assert rows["k=1"]["gap"] == pytest.approx(rows["k=1"]["nll"] - rows["raster"]["nll"])
    assert evaluate("--teacher-forced").code == 0
    assert path.read_text() == text
    path.write_text(text[:-40])  # killed while it wrote the last line
    assert evaluate("--teacher-forced").document["rows"] == outcome.document["rows"]
    assert read_results(path).clips[:-1] == lines[:-1]
    assert read_results(path).clips[-1] == lines[-1] | {"run": 1}
    evaluate("--teacher-forced", "--frames", 4).assert_refused("was measured with num_frames=5")
    evaluate("--teacher-forced", "--start", 1).assert_refused("was measured with start=0, now 1")
    evaluate("--teacher-forced", "--workers", 2).assert_refused("leave --workers out")


def test_drift_goes_on_past_the_clip_s_end(evaluate, command, tmp_path, world, clips):
    """Clips have 6 frames, 2 are given, 12 more are dreamt: their 4 actions, three times."""
    outcome = evaluate("--drift", "--frames", 14)
    assert outcome.code == 0, outcome.err
    records = read_results(tmp_path / "out" / "results.jsonl").clips
    for record in records:
        is_dream, is_truth = record["stats"] is not None, record["strategy"] == "truth"
        length = 12 if is_dream else 4
        assert {len(values) for values in record["drift"].values()} == {length}
        assert {len(values) for values in record["quality"].values()} == (
            set() if is_truth else {4}
        )
    rows = outcome.document["rows"]
    frames = {row["strategy"]: row["frames"] for row in rows}  # the last of each
    assert frames == {
        **{key: [9, 12] for key in ("raster", "k=2", "k=1")},
        **{key: [1, 4] for key in ("truth", "copy", "reconstruction")},
    }
    assert "9-12" in outcome.said
    assert evaluate("--drift", "--frames", 14).document["measured"] == 0
    evaluate("--frames", 14).assert_refused("expected at least 14 frames from frame 0 on, got 6")
    record = next(r for r in records if r["strategy"] == "k=1")
    generator = VideoGenerator.from_pretrained(world, backend="native")
    size = generator.frame_size_px
    clip = find_clips(clips, generator.vocabulary)[record["clip"]].read(6, 0, None, size)
    assert clip.actions is not None
    video = generator.generate(
        clip.frames[:2],
        clip.actions[2:] * 3,
        strategy="k=1",
        context_actions=clip.actions[1:2],
        sampling=diagd.SamplingOptions(1.0, top_p=0.9),
        seed=record["seed"],
    )
    assert unpack(record["tokens"]).tolist() == video.tokens.tolist()
    report = command("report", "--results", tmp_path / "out", "--out", tmp_path / "report")
    assert report.code == 0, report.err
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| model | strategy | frames | samples | TFD↓ | PSNR↑ | SSIM↑ | sharpness |" in text
    assert (tmp_path / "report" / "figures" / "drift.png").is_file()


def test_revisit_turns_away_and_back(evaluate, command, tmp_path, world, clips):
    flags = "--num-clips", 2, "--context-frames", 2, "--backend", "native", "--strategy", "k=1"
    flags = "--model", world, "--clips", clips, "--out", tmp_path / "out", *flags, "--json"
    outcome = command("evaluate", *flags, "--revisit", 3)
    assert outcome.code == 0, outcome.err
    records = read_results(tmp_path / "out" / "results.jsonl").clips
    assert [r["strategy"] for r in records] == ["reconstruction", "chance", "raster", "k=1"] * 2
    record = records[3]
    generator = VideoGenerator.from_pretrained(world, backend="native")
    size = generator.frame_size_px
    clip = find_clips(clips, generator.vocabulary)[record["clip"]].read(2, 0, None, size)
    assert clip.actions is not None
    video = generator.generate(
        clip.frames,
        "left*3,none,right*3",
        strategy="k=1",
        context_actions=clip.actions[1:2],
        sampling=diagd.SamplingOptions(1.0, top_p=0.9),
        seed=record["seed"],
    )
    expected = psnr(video.frames, clip.frames[1:].expand_as(video.frames))
    assert record["quality"]["psnr"] == pytest.approx(expected.tolist())
    other = find_clips(clips)[clips_after(clips, record["clip"])[0]].read(2, 0, None, size)
    expected = psnr(other.frames[1], clip.frames[1])
    assert records[1]["quality"]["psnr"] == [pytest.approx(expected.item())] * 7
    assert "left for 3, nothing for one, right for 3" in " ".join(outcome.document["notes"])
    wrong = command("evaluate", *flags, "--revisit", 3, "--revisit-actions", "left", "up")
    wrong.assert_refused("unknown action 'up'")
    report = command("report", "--results", tmp_path / "out", "--out", tmp_path / "report")
    assert report.code == 0, report.err
    assert (tmp_path / "report" / "figures" / "revisit.png").is_file()


def test_chance_is_the_next_clip_that_can_be_read(command, tmp_path, world):
    """The next but one: between them is one without frames to speak of, and none was drawn."""
    folder = write_clips(tmp_path / "mixed", count=4)
    (drawn,) = choose_clips(folder, 1, 0)
    bad, good, _ = clips_after(folder, drawn)
    (folder / f"{bad}.mp4").write_bytes(b"no video")
    flags = "--num-clips", 1, "--context-frames", 2, "--backend", "native", "--strategy", "k=1"
    flags = "--model", world, "--clips", folder, *flags, "--revisit", 1, "--json"
    outcome = command("evaluate", *flags, "--out", tmp_path / "out")
    assert (outcome.code, outcome.document["failed"]) == (0, {})
    chance = read_results(tmp_path / "out" / "results.jsonl").clips[1]
    own, other = (read_video(folder / f"{name}.mp4").frames[1] for name in (drawn, good))
    assert chance["quality"]["psnr"] == [pytest.approx(psnr(other, own).item())] * 3
    for name in clips_after(folder, drawn):
        (folder / f"{name}.mp4").write_bytes(b"no video")
    outcome = command("evaluate", *flags, "--out", tmp_path / "alone")
    assert outcome.code == 1
    assert "no other clip can be read to compare with" in outcome.document["failed"][drawn]


def test_chance_needs_another_clip(tmp_path):
    clips = write_clips(tmp_path / "one", count=1)
    with pytest.raises(ValueError, match="holds one clip only"):
        clips_after(clips, "clip_0")
