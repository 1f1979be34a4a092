"""LPIPS with random weights against the formula, written out with NumPy."""

import os

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from diagd.metrics.perceptual import NETWORKS, Lpips, features_of, short_sha256
from tests.worlds import smooth_frames

# torchvision's alexnet.features and vgg16.features: (place, out, in, kernel)
SHAPES = {
    "alex": [
        (0, 64, 3, 11),
        (3, 192, 64, 5),
        (6, 384, 192, 3),
        (8, 256, 384, 3),
        (10, 256, 256, 3),
    ],
    "vgg": [
        *[(0, 64, 3, 3), (2, 64, 64, 3), (5, 128, 64, 3), (7, 128, 128, 3), (10, 256, 128, 3)],
        *[(12, 256, 256, 3), (14, 256, 256, 3), (17, 512, 256, 3), (19, 512, 512, 3)],
        *[(21, 512, 512, 3), (24, 512, 512, 3), (26, 512, 512, 3), (28, 512, 512, 3)],
    ],
}
READ = {"alex": (0, 3, 6, 8, 10), "vgg": (2, 7, 14, 21, 28)}  # the convolutions compared
PADDING = {11: 2, 5: 2, 3: 1}


def random_weights(network):
    generator = torch.Generator().manual_seed(3)
    weights = {"classifier.6.bias": torch.zeros(1000)}  # there, and not looked at
    for place, out, into, kernel in SHAPES[network]:
        scale = (2 / (into * kernel**2)) ** 0.5
        shape = out, into, kernel, kernel
        weights[f"features.{place}.weight"] = torch.randn(shape, generator=generator) * scale
        weights[f"features.{place}.bias"] = torch.randn(out, generator=generator) * 0.1
    return weights


def random_heads(network):
    generator = torch.Generator().manual_seed(4)
    widths = [out for place, out, _, _ in SHAPES[network] if place in READ[network]]
    return {
        f"lin{number}.model.1.weight": torch.rand((1, width, 1, 1), generator=generator)
        for number, width in enumerate(widths)
    }


def write(folder, network):
    torch.save(random_weights(network), folder / "backbone.pth")
    torch.save(random_heads(network), folder / "heads.pth")
    return folder / "backbone.pth", folder / "heads.pth"


def maps_of_alexnet(frame, weights):
    """Return AlexNet's five feature maps of a (H, W, 3) frame."""
    x = frame.astype(np.float64).transpose(2, 0, 1) / 127.5 - 1
    shift, scale = np.array([-0.030, -0.088, -0.188]), np.array([0.458, 0.448, 0.450])
    x = (x - shift[:, None, None]) / scale[:, None, None]
    maps = []
    for place, _, _, kernel in SHAPES["alex"]:
        if place in (3, 6):
            height, width = ((size - 3) // 2 + 1 for size in x.shape[1:])
            x = np.array(
                [
                    [[c[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max() for j in range(width)]
                     for i in range(height)]
                    for c in x
                ]
            )  # fmt: skip
        pad = PADDING[kernel]
        padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
        weight = weights[f"features.{place}.weight"].double().numpy()
        bias = weights[f"features.{place}.bias"].double().numpy()
        patches = sliding_window_view(padded, (kernel, kernel), (1, 2))  # (in, i, j, k, k)
        x = np.tensordot(weight, patches, ([1, 2, 3], [0, 3, 4])) + bias[:, None, None]
        stride = 4 if kernel == 11 else 1
        x = np.maximum(x[:, ::stride, ::stride], 0)
        maps.append(x)
    return maps


def test_lpips_of_alexnet_is_the_formula_written_out(tmp_path):
    metric = Lpips(*write(tmp_path, "alex"))
    video, reference = smooth_frames(2, 40, 56), smooth_frames(2, 40, 56, seed=1)
    weights, heads = random_weights("alex"), random_heads("alex")
    expected = []
    for a, b in zip(video.numpy(), reference.numpy(), strict=True):
        total = 0.0
        pairs = zip(maps_of_alexnet(a, weights), maps_of_alexnet(b, weights), strict=True)
        for number, pair in enumerate(pairs):
            p, q = (m / (np.sqrt((m**2).sum(0)) + 1e-10) for m in pair)
            head = heads[f"lin{number}.model.1.weight"].double().numpy().reshape(-1, 1, 1)
            total += (head * (p - q) ** 2).sum(0).mean()
        expected.append(total)
    # float32 convolutions of up to 3,456 terms
    assert metric(video, reference).tolist() == pytest.approx(expected, rel=1e-4)
    assert min(expected) > 0.01


def test_vgg_is_the_same_stack_as_torch_builds_it(tmp_path):
    metric = Lpips(*write(tmp_path, "vgg"))
    weights, heads = random_weights("vgg"), random_heads("vgg")
    layers, maps = [], []
    for place, out, into, _ in SHAPES["vgg"]:
        if place in (5, 10, 17, 24):
            layers.append(torch.nn.MaxPool2d(2, 2))
        layers += [torch.nn.Conv2d(into, out, 3, padding=1), torch.nn.ReLU()]
    stack = torch.nn.Sequential(*layers)
    names = {f"features.{name}" for name in stack.state_dict()}
    stack.load_state_dict({name[9:]: weights[name] for name in names})
    for number, layer in enumerate(stack):
        if number in (3, 8, 15, 22, 29):
            layer.register_forward_hook(lambda *call: maps.append(call[2]))
    video, reference = smooth_frames(1, 32, 48), smooth_frames(1, 32, 48, seed=1)
    shift = torch.tensor([-0.030, -0.088, -0.188]).view(3, 1, 1)
    scale = torch.tensor([0.458, 0.448, 0.450]).view(3, 1, 1)
    with torch.no_grad():
        for frames in (video, reference):
            stack(((frames.movedim(-1, 1) / 127.5 - 1) - shift) / scale)
    expected = 0.0
    for number in range(5):
        p, q = (torch.nn.functional.normalize(m, dim=1) for m in (maps[number], maps[number + 5]))
        expected += ((p - q) ** 2 * heads[f"lin{number}.model.1.weight"]).sum(1).mean().item()
    assert metric(video, reference).tolist() == pytest.approx([expected], rel=1e-5)
    assert metric.provenance["network"] == "vgg"


def test_equal_frames_have_no_distance_and_batches_change_nothing(tmp_path, monkeypatch):
    metric = Lpips(*write(tmp_path, "alex"))
    video, reference = smooth_frames(5, 40, 56), smooth_frames(5, 40, 56, seed=1)
    assert metric(video, video).tolist() == [0] * 5
    whole = metric(video, reference)
    monkeypatch.setattr("diagd.metrics.perceptual._BATCH", 2)
    assert metric(video, reference).tolist() == pytest.approx(whole.tolist(), rel=1e-5)


def test_the_authors_heads_come_with_torchmetrics(tmp_path):
    backbone, _ = write(tmp_path, "alex")
    metric = Lpips(backbone)
    assert metric.provenance == {
        "network": "alex",
        "backbone_sha256": short_sha256(backbone),
        "heads_sha256": "df73285e35b2",  # of the authors' alex.pth, version 0.1
    }
    distances = metric(smooth_frames(1, 40, 56), smooth_frames(1, 40, 56, seed=1))
    assert distances.item() > 0


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_have_torchvision_s_shapes(network):
    places = [
        (place, layer.out_channels, layer.in_channels, layer.kernel_size[0])
        for place, layer in enumerate(features_of(NETWORKS[network]))
        if isinstance(layer, torch.nn.Conv2d)
    ]
    assert places == SHAPES[network]
    assert tuple(place - 1 for place in NETWORKS[network].compared) == READ[network]


@pytest.mark.parametrize(("network", "smallest"), [("alex", 31), ("vgg", 16)])
def test_frames_too_small_for_the_network_are_refused(network, smallest, tmp_path):
    metric = Lpips(*write(tmp_path, network))
    frames = smooth_frames(1, smallest, smallest + 8)
    assert metric(frames, frames).item() == 0
    message = f"LPIPS needs frames of {smallest} px or more, got {smallest - 1}x{smallest + 8}"
    with pytest.raises(ValueError, match=message):
        metric(frames[:, 1:], frames[:, 1:])


def test_weights_that_do_not_fit_are_refused(tmp_path):
    backbone, heads = write(tmp_path, "alex")
    with pytest.raises(FileNotFoundError, match=r"file not found: .*absent\.pth"):
        Lpips(tmp_path / "absent.pth")
    with pytest.raises(
        ValueError, match=r"heads\.pth must hold features\.\* of torchvision's alex"
    ):
        Lpips(heads)
    wrong = random_weights("alex") | {"features.6.bias": torch.zeros(3)}
    torch.save(wrong, tmp_path / "wrong.pth")
    with pytest.raises(ValueError, match=r"features\.6\.bias \(expected \(384,\), got \(3,\)\)"):
        Lpips(tmp_path / "wrong.pth")
    with pytest.raises(ValueError, match=r"does not match LPIPS of alex: 5 missing tensors: lin0"):
        Lpips(backbone, backbone)
    torch.save(random_weights("alex") | {"features.6.bias": torch.full((384,), torch.nan)}, heads)
    with pytest.raises(ValueError, match=r"heads\.pth: features\.6\.bias holds NaN or infinity"):
        Lpips(heads)


class _Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_a_weight_file_never_runs_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"features.0.weight": _Trap()}, tmp_path / "trap.pth")
    with pytest.raises(ValueError, match=r"trap\.pth: refused"):
        Lpips(tmp_path / "trap.pth")
    assert not (tmp_path / "trapped").exists()
    (tmp_path / "text.pth").write_text("weights")
    with pytest.raises(ValueError, match=r"text\.pth: not a PyTorch checkpoint"):
        Lpips(tmp_path / "text.pth")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth: expected a dict of tensors"):
        Lpips(tmp_path / "list.pth")
