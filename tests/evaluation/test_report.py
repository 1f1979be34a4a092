import re

import av
import numpy as np
import pytest

from diagd.data.video import read_video, write_video
from diagd.evaluation.options import ReportOptions
from diagd.evaluation.report import main
from diagd.evaluation.results import read_results, video_path
from tests.evaluation.lines import clip_line, run_line, write_lines
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames

STEPS = {"raster": 45, "k=2": 27, "k=1": 21}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Write an evaluation of two models on three clips, with the videos of two clips."""
    folder = tmp_path_factory.mktemp("measured")
    generator = np.random.default_rng(0)
    lines = [run_line("tiny", "tuned <k=1>")]
    for model in ("tiny", "tuned <k=1>"):
        for clip in ("a", "b", "c"):
            for strategy in ("truth", "copy", "reconstruction", *STEPS):
                line = clip_line(
                    strategy,
                    clip,
                    [] if strategy == "truth" else (20 + generator.random(3)).tolist(),
                    model,
                    features={"tfd": generator.normal(size=(3, 2))},
                    steps=STEPS.get(strategy),
                    fps=90 / STEPS.get(strategy, 1),
                )
                if clip != "c":
                    line["video"] = video_path(model, strategy, clip)
                    path = folder / line["video"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_video(path, smooth_frames(3, HEIGHT_PX, WIDTH_PX, len(lines)), fps=8)
                lines.append(line)
    write_lines(folder / "results.jsonl", *lines)
    return folder


@pytest.fixture(scope="module")
def report(measured, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    main(ReportOptions(measured, out))
    return out


def test_every_file_the_page_and_the_markdown_name_is_there(report):
    page, text = ((report / name).read_text() for name in ("report.html", "report.md"))
    named = set(re.findall(r'src="([^"]+)"', page))
    assert named == set(re.findall(r"\]\(([^)]+)\)", text))
    assert len(named) == 2 + 2 + 4  # plots, a strip for each clip, a video for each clip and model
    for name in named:
        assert not name.startswith(("/", "http"))
        assert (report / name).is_file()
    written = {str(p.relative_to(report)) for p in report.rglob("*") if p.is_file()}
    assert written == named | {"report.html", "report.md"}
    assert "http" not in page
    assert "<script" not in page


def test_clips_whose_names_look_alike_keep_their_pictures(tmp_path):
    lines = [run_line("tiny")]
    for seed, clip in enumerate(("a/b", "a_b")):
        line = clip_line("raster", clip, (20.0, 21.0, 22.0), steps=45)
        line["video"] = video_path("tiny", "raster", clip)
        path = tmp_path / line["video"]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_video(path, smooth_frames(3, HEIGHT_PX, WIDTH_PX, seed), fps=8)
        lines.append(line)
    write_lines(tmp_path / "results.jsonl", *lines)
    main(ReportOptions(tmp_path, tmp_path / "out"))
    for kind, written in (("videos", "*.mp4"), ("figures", "a_b*.png")):
        files = [path.read_bytes() for path in (tmp_path / "out" / kind).glob(written)]
        assert len(set(files)) == 2


def test_labels_are_escaped(report):
    page = (report / "report.html").read_text()
    assert "tuned &lt;k=1&gt;" in page
    assert "tuned <k=1>" not in page
    assert "work/&lt;study&gt;" in page  # in the options


def test_the_tables_hold_the_paper_s_columns_and_rows(report, measured):
    text = (report / "report.md").read_text()
    header = "| model | strategy | clips | PSNR↑ | TFD↓ | frames/s↑ | tokens/s↑ | steps↓ |"
    assert header[:-2] in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny |")]
    assert [row[1] for row in rows[:5]] == ["raster", "k=2", "k=1", "copy", "reconstruction"]
    clips = read_results(measured / "results.jsonl").clips
    values = [r["quality"]["psnr"] for r in clips if (r["model"], r["strategy"]) == ("tiny", "k=2")]
    assert rows[1][3].strip("*").startswith(f"{np.mean(values):.2f} [")
    fps = [row[5].strip("*") for row in rows[:3]]
    assert fps == ["2.00", "3.33", "4.29"]
    assert (rows[2][5], rows[2][7]) == ("**4.29**", "**21**")
    differences = rows[5:]
    assert [row[1] for row in differences[:2]] == ["k=2", "k=1"]
    assert differences[1][3:] == ["2.14x", "2.14x |"]


def test_a_table_comes_before_what_is_to_be_said_of_it(report):
    text, page = ((report / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert 0 < text.index("| tiny | raster") < text.index("Means over clips and generated frames")
    assert 0 < page.index("<table>") < page.index("<p class=note>Means over clips")


def test_plots_are_dark_where_the_page_is_and_pictures_of_the_game_are_not(report):
    page = (report / "report.html").read_text()
    assert "@media (prefers-color-scheme: dark) { img.plot { filter: invert" in page
    pictures = re.findall(r"<img src=\"figures/(\w+)\.png\"[^>]* loading=lazy( class=plot)?>", page)
    assert {name for name, is_plot in pictures if is_plot} == {"frontier", "horizons"}
    assert len(pictures) > 2


def test_what_is_missing_and_what_is_ours_is_said(report):
    text = (report / "report.md").read_text()
    assert "FVD: not measured, it needs weights (--fvd-detector i3d)." in text
    assert "LPIPS: not measured, it needs weights (--lpips-backbone FILE)." in text
    assert "TFD is the tokenizer Frechet distance, not FVD" in text
    assert "(9 each) in 2 statistics" in text


def test_numbers_can_be_traced_to_commit_machine_seed_and_options(report):
    text = (report / "report.md").read_text()
    for part in (
        "commit abc123",
        "a machine",
        "torch 2.13",
        "seed 7",
        "0123456789ab",
        '"workers": 0',
    ):
        assert part in text
    assert "3 clips of 5 frames: 2 given, 3 generated" in text
    assert "temperature 1, top-p 0.9, seed 7" in text


def test_videos_stand_side_by_side_with_labels(report):
    video = read_video(report / "videos" / "a_tiny.mp4")
    factor = round(200 / HEIGHT_PX)
    height, width = (HEIGHT_PX * factor + 24 + 4), (WIDTH_PX * factor + 4)
    # truth and raster over k=2 and k=1
    assert video.frames.shape == (3, 2 * height + 4, 2 * width + 4, 3)
    assert video.fps == 8
    inside = video.frames[0, 4:, 4 : 4 + WIDTH_PX * factor].float()
    first = inside[24 : 24 + HEIGHT_PX * factor]
    truth = smooth_frames(3, HEIGHT_PX, WIDTH_PX, 1)[0]
    enlarged = truth.repeat_interleave(factor, 0).repeat_interleave(factor, 1).float()
    assert (first - enlarged).abs().mean() < 10  # twice through H.264
    labels = inside[:24]
    assert labels.min() < 100 < 240 < labels.median()
    with av.open(str(report / "videos" / "a_tiny.mp4")) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"  # what browsers play


def test_the_command_writes_beside_the_results_and_shows_as_many_clips_as_asked(
    command, measured, tmp_path
):
    outcome = command("report", "--results", measured, "--examples", 1, "--out", tmp_path, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["page"] == str(tmp_path / "report.html")
    assert len(outcome.document["rows"]) == 10
    assert [path.name for path in (tmp_path / "videos").iterdir()] != []
    assert {path.name[0] for path in (tmp_path / "videos").iterdir()} == {"a"}


def test_results_without_videos_make_a_page_without_examples(command, tmp_path):
    lines = [clip_line(m, c, (20.0, 21.0), steps=s) for m, s in STEPS.items() for c in "ab"]
    write_lines(tmp_path / "results.jsonl", run_line(), *lines)
    outcome = command("report", "--results", tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert "Example a" not in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "videos").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--results", "absent"), r"results not found: absent/results\.jsonl"),
        (("--results", "x", "--examples", -1), "examples must be at least 0, got -1"),
    ],
)
def test_bad_options_are_refused(flags, message, command):
    command("report", *flags).assert_refused(message)


def test_results_without_clips_and_missing_videos_are_refused(command, tmp_path):
    path = write_lines(tmp_path / "results.jsonl", run_line())
    command("report", "--results", tmp_path).assert_refused("holds no measured clips yet")
    baselines = [clip_line(name, "a", (20.0,)) for name in ("reconstruction", "copy")]
    write_lines(path, run_line(), clip_line("truth", "a"), *baselines)  # killed before raster
    command("report", "--results", tmp_path).assert_refused("holds no measured clips yet")
    assert not (tmp_path / "figures").exists()
    line = clip_line("raster", "a", (20.0,), steps=45) | {"video": "videos/gone.mp4"}
    write_lines(path, run_line(), line)
    command("report", "--results", tmp_path).assert_refused(r"video not found: .*gone\.mp4")
    (tmp_path / "videos").mkdir(exist_ok=True)
    (tmp_path / "videos" / "gone.mp4").write_text("no video")
    command("report", "--results", tmp_path).assert_refused(r"gone\.mp4 cannot be decoded")
