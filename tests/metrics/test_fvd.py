import numpy as np
import pytest
import torch

from diagd.metrics.perceptual import VideoFeatures, short_sha256
from tests.metrics.detectors import TinyDetector, write_detector
from tests.worlds import smooth_frames


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return write_detector(tmp_path_factory.mktemp("detector") / "i3d.pt")


def shrunk_or_grown(frame, size):
    """Bilinear without antialiasing, sample by sample, pixel centres half a pixel in."""
    height, width = frame.shape[:2]
    rows = ((np.arange(size[0]) + 0.5) * height / size[0] - 0.5).clip(0, height - 1)
    columns = ((np.arange(size[1]) + 0.5) * width / size[1] - 0.5).clip(0, width - 1)
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    v, u = (rows - top)[:, None, None], (columns - left)[None, :, None]
    at = frame.astype(np.float64)
    upper = at[top][:, left] * (1 - u) + at[top][:, right] * u
    lower = at[down][:, left] * (1 - u) + at[down][:, right] * u
    return upper * (1 - v) + lower * v


@pytest.mark.parametrize(("height_px", "width_px"), [(28, 48), (48, 28)])
@pytest.mark.parametrize("way", ["crop", "stretch"])
def test_frames_are_scaled_to_224_pixels_as_said(way, height_px, width_px, detector):
    frames = smooth_frames(10, height_px, width_px)
    video, rescale, resize = VideoFeatures(detector, way).prepare(frames)
    assert (rescale, resize, video.shape) == (False, False, (1, 3, 10, 224, 224))
    size = (224, 224) if way == "stretch" else (224, 384) if width_px > height_px else (384, 224)
    expected = shrunk_or_grown(frames[3].numpy(), size)
    top, left = (size[0] - 224) // 2, (size[1] - 224) // 2
    expected = expected[top : top + 224, left : left + 224] / 127.5 - 1
    np.testing.assert_allclose(video[0, :, 3].movedim(0, -1).numpy(), expected, atol=1e-5)


def test_the_detector_may_scale_by_itself(detector):
    frames = smooth_frames(10, 28, 48)
    features = VideoFeatures(detector, "detector")
    video, rescale, resize = features.prepare(frames)
    assert (rescale, resize, video.shape) == (True, True, (1, 3, 10, 28, 48))
    assert torch.equal(video[0, :, 3].movedim(0, -1), frames[3].float())
    # what it does then is what `stretch` does beforehand
    stretched = VideoFeatures(detector, "stretch")(frames)
    assert features(frames).tolist() == pytest.approx(stretched.tolist(), abs=1e-5)


@pytest.mark.parametrize("way", ["crop", "stretch", "detector"])
def test_features_are_those_of_the_detector(way, detector):
    frames = smooth_frames(11, 28, 48)
    metric = VideoFeatures(detector, way)
    video, rescale, resize = metric.prepare(frames)
    expected = TinyDetector()(video, rescale, resize, True)[0]
    assert metric(frames).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert metric(frames).shape == (9,)
    assert metric.provenance == {"resize": way, "detector_sha256": short_sha256(detector)}


def test_the_hash_is_that_of_sha256sum(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert short_sha256(tmp_path / "file") == "ba7816bf8f01"


def test_bad_detectors_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"file not found: .*absent\.pt"):
        VideoFeatures(tmp_path / "absent.pt")
    (tmp_path / "text.pt").write_text("no TorchScript")
    with pytest.raises(ValueError, match=r"text\.pt: not a TorchScript file"):
        VideoFeatures(tmp_path / "text.pt")
