"""`diagd evaluate` on a model of images."""

import numpy as np
import pytest
import torch
from PIL import Image

import diagd
from diagd.evaluation.results import read_results, unpack
from diagd.metrics.frechet import frechet_distance
from diagd.metrics.perceptual import short_sha256
from diagd.metrics.quality import psnr, ssim
from diagd.pipeline.prompts import seed_of
from tests.families.emu3.folders import HEIGHT, NUM_CODES, WIDTH, emu3, write_emu3
from tests.families.emu3.test_emu3 import SCALE, own_logits
from tests.families.images import guided_price
from tests.metrics.detectors import TinyInception, write_detector
from tests.metrics.published import narrow, write_efficientnet

TEXTS = ("a red house", "a big blue house")
STEPS = HEIGHT * (WIDTH + 1)  # in raster order


@pytest.fixture(scope="module")
def theirs():
    return emu3()


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    return write_emu3(tmp_path_factory.mktemp("emu3"), theirs)


@pytest.fixture
def evaluate(command, folder, tmp_path):
    """Run the command on the little Emu3, with two texts."""
    texts = tmp_path / "texts.txt"
    texts.write_text(f"{TEXTS[0]}\n\n  {TEXTS[1]}\n")

    def run(*flags):
        base = ("--model", f"tiny={folder}", "--prompts", texts, "--out", tmp_path / "out")
        return command("evaluate", *base, "--strategy", "k=2", "k=1", "exact", *flags, "--json")

    return run


@pytest.mark.proves("Emu3", "evaluate")
def test_strategies_are_compared_with_raster_on_each_text(evaluate, folder, theirs, tmp_path):
    outcome = evaluate()
    assert outcome.code == 0, outcome.err
    document = outcome.document
    lines = read_results(tmp_path / "out" / "images.jsonl").clips
    names = "raster", "k=2", "k=1", "exact"
    assert [(one["clip"], one["strategy"]) for one in lines] == [
        (text, name) for text in TEXTS for name in names
    ]
    world = diagd.VideoGenerator.from_pretrained(folder)
    assert world.text is not None
    by_key = {(one["clip"], one["strategy"]): one for one in lines}
    for text in TEXTS:
        made = {
            name: world.generate(text=text, strategy=name, seed=seed_of(text, 0)) for name in names
        }
        raster = made["raster"]
        for name, image in made.items():
            line = by_key[text, name]
            quality = line["quality"]
            assert unpack(line["tokens"]).tolist() == image.tokens[..., :-1].tolist()
            if name != "exact":  # whose lanes follow how long steps take here
                assert line["stats"]["num_steps"] == image.stats.num_steps
            if name == "raster":
                assert quality.keys() == {"nll"}
            else:
                assert quality["psnr"] == psnr(image.frames, raster.frames).tolist()
                assert quality["ssim"] == ssim(image.frames, raster.frames).tolist()
            if name == "exact":
                assert "nll" not in quality
                continue
            row_lag = {"raster": WIDTH + 1, "k=2": 2, "k=1": 1}[name]
            price = guided_price(
                own_logits(theirs), world.text(text), SCALE, raster.tokens[0], row_lag, NUM_CODES
            )
            assert quality["nll"] == [pytest.approx(price, abs=1e-4)]
    rows = {row["strategy"]: row for row in document["rows"]}
    nll = {name: [by_key[text, name]["quality"]["nll"][0] for text in TEXTS] for name in names[:3]}
    assert rows["raster"]["nll"]["difference"] is None
    assert rows["k=1"]["nll"]["difference"] == pytest.approx(
        (sum(nll["k=1"]) - sum(nll["raster"])) / 2
    )
    assert rows["raster"]["num_steps"] == STEPS
    assert rows["k=1"]["num_steps"] == HEIGHT - 1 + WIDTH + 1
    assert rows["exact"]["equal_to_raster"] == 1
    assert rows["exact"]["nll"] is None
    assert rows["k=1"]["seconds"] == pytest.approx(1 / rows["k=1"]["frames_per_second"])
    for word in ("nats a token", "above raster", "PSNR", "SSIM", "tokens/s", "speedup", "FID: not"):
        assert word in outcome.said
    tables, _, _ = outcome.err.partition("Nats a token")
    assert max(map(len, tables.splitlines())) <= 80


def test_a_killed_run_goes_on_and_other_settings_are_refused(evaluate, tmp_path):
    assert evaluate().document["measured"] == 8
    path = tmp_path / "out" / "images.jsonl"
    whole = read_results(path).clips
    kept = path.read_bytes().splitlines(keepends=True)[:3]
    path.write_bytes(b"".join(kept) + b'{"kind": "cl')
    assert evaluate().document["measured"] == 6

    def measured(lines):
        names = "clip", "strategy", "quality", "tokens", "seed"
        return [[one[name] for name in names] for one in lines]

    assert measured(read_results(path).clips) == measured(whole)
    assert evaluate().document["measured"] == 0
    evaluate("--seed", 1).assert_refused("was measured with seed=0, now 1")
    evaluate("--guidance", 1).assert_refused("was measured with guidance=None, now 1.0")
    evaluate("--temperature", 0.5).assert_refused("was measured with temperature=None, now 0.5")


def test_images_are_kept_on_request(evaluate, folder, tmp_path):
    evaluate("--save-videos", "--num-clips", 1)
    lines = read_results(tmp_path / "out" / "images.jsonl").clips
    (line,) = (one for one in lines if one["strategy"] == "k=1")
    assert line["video"] == f"images/tiny/k=1/{line['clip'].replace(' ', '_')}-{line['seed']}.png"
    world = diagd.VideoGenerator.from_pretrained(folder)
    image = world.generate(text=line["clip"], strategy="k=1", seed=line["seed"])
    with Image.open(tmp_path / "out" / line["video"]) as written:
        assert torch.equal(torch.tensor(list(written.tobytes())), image.frames.flatten())


def test_fid_is_the_distance_from_the_images_of_raster(evaluate, tmp_path):
    detector = write_detector(tmp_path / "inception.pt", TinyInception)
    document = evaluate("--fid-detector", detector, "--save-videos").document
    pictures = {}
    for line in read_results(tmp_path / "out" / "images.jsonl").clips:
        with Image.open(tmp_path / "out" / line["video"]) as image:
            pixels = np.asarray(image, dtype=np.float64)
        halves = np.split(pixels, 2, axis=1)
        pictures.setdefault(line["strategy"], []).append(
            np.concatenate([half.mean((0, 1)) for half in halves])
        )
    rows = {row["strategy"]: row["fid"] for row in document["rows"]}
    assert rows["raster"] is None
    for name in ("k=2", "k=1", "exact"):
        apart = frechet_distance(*(np.stack(pictures[one]) for one in (name, "raster")))
        assert rows[name]["value"] == pytest.approx(apart, rel=1e-3, abs=1e-3)
        assert (rows[name]["samples"], rows[name]["dimension"]) == (2, 6)
    notes = " ".join(document["notes"])
    assert f"detector_sha256 {short_sha256(detector)}." in notes
    assert "Warning: FID of 2 samples in 6 dimensions" in notes


def test_efd_is_the_distance_in_efficientnet_s_features_under_its_own_name(
    evaluate, tmp_path, monkeypatch
):
    narrow(monkeypatch)
    write_efficientnet(tmp_path / "lite0.pth")
    detector = f"efficientnet-lite0={tmp_path / 'lite0.pth'}"
    document = evaluate("--efd-detector", detector).document
    rows = {row["strategy"]: row for row in document["rows"]}
    assert rows["raster"]["efd"] is None
    assert rows["k=1"]["efd"]["dimension"] == 12
    assert rows["k=1"]["fid"] is None
    notes = " ".join(document["notes"])
    assert f"features, weights_sha256 {short_sha256(tmp_path / 'lite0.pth')}." in notes
    assert "Warning: EFD of 2 samples in 12 dimensions" in notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fid-detector", "absent.pt"), "absent.pt"),
        (("--efd-detector", "i3d"), "efd_detector must be efficientnet-lite0, or that with =FILE"),
        (("--frames", 3), "frames is for clips: leave it out with a file of prompts"),
        (("--drift",), "drift is for clips"),
        (("--teacher-forced",), "teacher_forced is for clips"),
        (("--num-clips", 3), "expected a number of prompts from 1 to 2, got 3"),
        (("--model", "doom"), "doom continues clips: give a folder of them with --clips"),
        (("--strategy", "k=7"), r"row_lag must be in \[1, width=6\], got 7"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(flags, message, evaluate, tmp_path):
    evaluate(*flags).assert_refused(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "expected one text or class per line, got none"),
        (b"a\nb\na\n", "'a' is there twice"),
        (b"\xff\xfe", ": expected a text file"),
        (b"a " * 40, "text and image need"),
    ],
)
def test_bad_files_of_prompts_are_refused_in_one_line(content, message, evaluate, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    evaluate("--prompts", path).assert_refused(message)


def test_a_file_of_prompts_that_is_not_there_is_asked_for(evaluate):
    message = r"folder of clips, or file of prompts, not found: nowhere\.txt"
    evaluate("--prompts", "nowhere.txt").assert_refused(message)


def test_a_text_that_is_too_long_stops_no_other(evaluate, tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("a red house\n" + "a " * 40)
    outcome = evaluate("--prompts", path)
    assert (outcome.code, len(outcome.document["failed"])) == (1, 1)
    assert {row["clips"] for row in outcome.document["rows"]} == {1}


def test_clips_are_not_for_models_of_images(command, folder, tmp_path):
    (tmp_path / "clips").mkdir()
    diagd_clips = tmp_path / "clips"
    flags = "--model", f"tiny={folder}", "--clips", diagd_clips, "--out", tmp_path / "out"
    outcome = command("evaluate", *flags, "--guidance", 2)
    outcome.assert_refused("guidance is for images: .*clips is no file of prompts")
