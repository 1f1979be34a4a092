"""I3D, ST-LPIPS and EfficientNet-Lite0 with random weights against plain readings of layers."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from diagd.metrics.frechet import I3D_FRAMES
from diagd.metrics.networks import _max_pool, _Unit
from diagd.metrics.perceptual import EfficientNetFeatures, StLpips, VideoFeatures, short_sha256
from tests.metrics.published import draw, narrow, write_efficientnet, write_i3d, write_stlpips
from tests.worlds import smooth_frames


def windows(x, kernel, stride, fill):
    """Yield (place, window) as TensorFlow's SAME defines them, for (T, H, W, C)."""
    outputs = [math.ceil(size / step) for size, step in zip(x.shape[:3], stride, strict=True)]
    totals = [
        max((n - 1) * step + taps - size, 0)
        for n, step, taps, size in zip(outputs, stride, kernel, x.shape[:3], strict=True)
    ]
    padding = [(total // 2, total - total // 2) for total in totals]
    padded = np.pad(x, [*padding, (0, 0)], constant_values=fill)
    for place in np.ndindex(*outputs):
        corner = [at * step for at, step in zip(place, stride, strict=True)]
        yield (
            place,
            padded[tuple(slice(at, at + taps) for at, taps in zip(corner, kernel, strict=True))],
        )


@pytest.mark.parametrize("shape", [(9, 14, 11), (10, 13, 16)])
def test_a_strided_unit_is_tensorflow_s_convolution(shape):
    unit = _Unit(3, 4, 7, stride=2)
    unit.load_state_dict(draw(unit))
    x = np.random.default_rng(0).standard_normal((*shape, 3))
    kernel, mean, var, bias = (
        getattr(unit, name).detach().double().numpy() for name in ("kernel", "mean", "var", "bias")
    )
    with torch.no_grad():
        ours = unit(torch.from_numpy(x).float().movedim(-1, 0)[None])[0].movedim(0, -1).numpy()
    for place, window in windows(x, (7, 7, 7), (2, 2, 2), fill=0.0):
        sums = np.tensordot(window, kernel, 4)
        expected = np.maximum((sums - mean.ravel()) / np.sqrt(var.ravel() + 1e-3) + bias, 0)
        np.testing.assert_allclose(ours[place], expected, atol=1e-4)  # sums of 1,029 terms


@pytest.mark.parametrize(
    ("kernel", "stride"), [((1, 3, 3), (1, 2, 2)), ((3, 3, 3), (2, 2, 2)), ((2, 2, 2), (2, 2, 2))]
)
def test_pooling_is_tensorflow_s(kernel, stride):
    x = np.random.default_rng(1).random((5, 8, 7, 2)).astype(np.float32)
    ours = _max_pool(torch.from_numpy(x).movedim(-1, 0)[None], kernel, stride)[0].movedim(0, -1)
    for place, window in windows(x, kernel, stride, fill=-np.inf):
        assert ours[place].tolist() == window.max((0, 1, 2)).tolist()


@pytest.mark.parametrize("num_frames", [I3D_FRAMES, 11])
def test_features_of_fvd_are_the_logits_of_the_file_s_network(num_frames, tmp_path, monkeypatch):
    narrow(monkeypatch)
    weights = write_i3d(tmp_path / "i3d.ckpt")
    metric = VideoFeatures(f"i3d={tmp_path / 'i3d.ckpt'}", "stretch")
    frames = smooth_frames(num_frames, 24, 40)
    features = metric(frames)
    x, _, _ = metric.prepare(frames)
    x = plain_i3d(x.double(), {name: tensor.double() for name, tensor in weights.items()})
    assert features.shape == (400,)
    assert features.tolist() == pytest.approx(x.tolist(), rel=1e-3, abs=1e-3)
    assert metric.provenance == {
        "resize": "stretch",
        "detector": "i3d",
        "detector_sha256": short_sha256(tmp_path / "i3d.ckpt"),
    }


def same(x, kernel, stride):
    total = [
        max((-(-n // s) - 1) * s + k - n, 0)
        for n, k, s in zip(x.shape[2:], kernel, stride, strict=True)
    ]
    return functional.pad(x, [part for t in reversed(total) for part in (t // 2, t - t // 2)])


def plain_i3d(x, weights):
    """Follow figure 3 of arXiv:1705.07750, normalization after the convolution."""

    def unit(x, name, stride=1):
        kernel = weights[f"{name}.kernel"].permute(4, 3, 0, 1, 2)
        x = functional.conv3d(same(x, kernel.shape[2:], (stride,) * 3), kernel, stride=stride)
        mean, var, bias = (
            weights[f"{name}.{kind}"].view(-1, 1, 1, 1) for kind in ("mean", "var", "bias")
        )
        return ((x - mean) / (var + 1e-3).sqrt() + bias).relu()

    def pool(x, kernel, stride):
        return functional.max_pool3d(same(x, kernel, stride), kernel, stride)

    def mixed(x, name):
        one = unit(x, f"{name}.Branch_0.Conv3d_0a_1x1")
        pair = (
            unit(unit(x, f"{name}.Branch_{n}.Conv3d_0a_1x1"), f"{name}.Branch_{n}.Conv3d_0b_3x3")
            for n in (1, 2)
        )
        last = unit(pool(x, (3, 3, 3), (1, 1, 1)), f"{name}.Branch_3.Conv3d_0b_1x1")
        return torch.cat([one, *pair, last], 1)

    x = pool(unit(x, "Conv3d_1a_7x7", 2), (1, 3, 3), (1, 2, 2))
    x = unit(unit(x, "Conv3d_2b_1x1"), "Conv3d_2c_3x3")
    x = pool(x, (1, 3, 3), (1, 2, 2))
    x = pool(mixed(mixed(x, "Mixed_3b"), "Mixed_3c"), (3, 3, 3), (2, 2, 2))
    for name in "bcdef":
        x = mixed(x, f"Mixed_4{name}")
    x = mixed(mixed(pool(x, (2, 2, 2), (2, 2, 2)), "Mixed_5b"), "Mixed_5c")
    x = functional.avg_pool3d(x, (2, 7, 7), 1)[0, :, :, 0, 0]  # (C, T')
    head = "Logits.Conv3d_0c_1x1"
    return (x.T @ weights[f"{head}.kernel"][0, 0, 0] + weights[f"{head}.bias"]).mean(0)


def test_stlpips_is_the_formula_with_a_blur_after_each_stride(tmp_path):
    features, heads, scaling = write_stlpips(tmp_path / "alex.pth", "stlpips-alex")
    metric = StLpips(f"stlpips-alex={tmp_path / 'alex.pth'}")
    video, reference = smooth_frames(2, 40, 56), smooth_frames(2, 40, 56, seed=1)

    def blur(x, place):
        x, filt = functional.pad(x, (2,) * 4, mode="reflect"), features[f"{place}.filt"]
        patches = x.unfold(2, 3, 2).unfold(3, 3, 2)  # (N, C, h, w, 3, 3)
        return (patches * filt[None, :, :, None].squeeze(2)[:, :, None]).sum((-1, -2))

    def conv(x, place, padding):
        return functional.conv2d(
            x, features[f"{place}.weight"], features[f"{place}.bias"], 1, padding
        )

    def maps(frames):
        x = frames.movedim(-1, 1) / 127.5 - 1
        x = (x - scaling["shift"].view(3, 1, 1)) / scaling["scale"].view(3, 1, 1)
        found = [blur(conv(x, 0, 2), 1).relu()]
        for blurred, place, padding in ((4, 5, 2), (8, 9, 1)):
            pooled = functional.max_pool2d(found[-1], 3, 1)
            found.append(conv(blur(pooled, blurred), place, padding).relu())
        for place in (11, 13):
            found.append(conv(found[-1], place, 1).relu())
        return [functional.normalize(one, dim=1) for one in found]

    apart = zip(maps(video), maps(reference), heads.values(), strict=True)
    parts = [((a - b) ** 2 * head).sum(1).mean((1, 2)) for a, b, head in apart]
    expected = torch.stack(parts).sum(0)
    assert metric(video, reference).tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert metric(video, video).tolist() == [0, 0]
    assert metric.provenance["network"] == "stlpips-alex"
    small = video[:, :20]
    with pytest.raises(ValueError, match="ST-LPIPS needs frames of 21 px or more, got 20x56"):
        metric(small, small)


def test_efficientnet_lite0_is_its_layers_one_after_the_other(tmp_path, monkeypatch):
    narrow(monkeypatch)
    weights = write_efficientnet(tmp_path / "lite0.pth")
    metric = EfficientNetFeatures(f"efficientnet-lite0={tmp_path / 'lite0.pth'}")
    frames = smooth_frames(2, 224, 224)

    def norm(x, name):
        mean, var = weights[f"{name}.running_mean"], weights[f"{name}.running_var"]
        x = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + 1e-3).sqrt()
        return x * weights[f"{name}.weight"].view(-1, 1, 1) + weights[f"{name}.bias"].view(-1, 1, 1)

    def conv(x, name, stride=1, groups=1):
        kernel = weights[f"{name}.weight"]
        padded = same(x, kernel.shape[2:], (stride, stride))
        return functional.conv2d(padded, kernel, None, stride, groups=groups)

    x = norm(conv((frames.movedim(-1, 1).float() - 127) / 128, "conv_stem", 2), "bn0").clamp(0, 6)
    for place in range(16):
        block, before = f"blocks.{place}", x
        if place:
            x = norm(conv(x, f"{block}.expand_conv"), f"{block}.bn0").clamp(0, 6)
        stride = 2 if place in (1, 3, 5, 11) else 1
        x = norm(conv(x, f"{block}.depthwise_conv", stride, x.shape[1]), f"{block}.bn1").clamp(0, 6)
        x = norm(conv(x, f"{block}.project_conv"), f"{block}.bn2")
        if stride == 1 and x.shape == before.shape:
            x = x + before
    expected = norm(conv(x, "conv_head"), "bn1").clamp(0, 6).mean((2, 3))
    np.testing.assert_allclose(metric(frames).numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)
    assert metric(smooth_frames(1, 24, 40)).shape == (1, 12)  # pictures of other sizes


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (VideoFeatures, "i3d"),
        (StLpips, "stlpips-vgg"),
        (EfficientNetFeatures, "efficientnet-lite0"),
    ],
)
def test_files_of_another_network_are_refused(make, name, tmp_path, monkeypatch):
    narrow(monkeypatch)
    write_i3d(tmp_path / "i3d")
    write_stlpips(tmp_path / "alex.pth", "stlpips-alex")
    write_efficientnet(tmp_path / "lite0.pth")
    for other in {"i3d": ["alex.pth"], "stlpips-vgg": ["alex.pth", "lite0.pth", "i3d"]}.get(
        name, ["alex.pth", "i3d"]
    ):
        with pytest.raises(
            ValueError, match=rf"{other}: (does not match|not a pickle|not a PyTorch)"
        ) as caught:
            make(f"{name}={tmp_path / other}")
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="file not found"):
        make(f"{name}={tmp_path / 'absent'}")
