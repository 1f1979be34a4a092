"""Weight files as the packages have them: names and shapes are theirs, numbers are random."""

import pickle

import torch

from diagd.metrics.networks import EfficientNetLite0, I3d
from diagd.metrics.perceptual import SHIFT_TOLERANT, features_of

# an I3D and an EfficientNet-Lite0 of the same layers, few channels wide
MIXED = dict.fromkeys(I3d.MIXED, (2, 3, 4, 2, 3, 1))
WIDTHS = 4, 4, 6, 6, 8, 8, 6
STAGES = tuple((*stage[:4], n) for stage, n in zip(EfficientNetLite0.STAGES, WIDTHS, strict=True))


LEAVES = ("weight", "bias", "running_mean", "running_var")


def narrow(monkeypatch):
    monkeypatch.setattr(I3d, "STEM", (4, 3, 5))
    monkeypatch.setattr(I3d, "MIXED", MIXED)
    for name, value in (("STEM", 4), ("HEAD", 12), ("STAGES", STAGES)):
        monkeypatch.setattr(EfficientNetLite0, name, value)


def draw(module):
    """Return the tensors of a module: weights about 1/sqrt(inputs), variances above zero."""
    generator = torch.Generator().manual_seed(5)
    drawn = {}
    for name, tensor in module.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("kernel"):
            values *= (2 / tensor[..., 0].numel()) ** 0.5
        elif tensor.ndim == 4 and not name.endswith("filt"):
            values *= (2 / tensor[0].numel()) ** 0.5
        elif name.endswith("var"):
            values = values.abs() + 0.5
        drawn[name] = values
    return drawn


def i3d_tree(weights):
    """Nest arrays under flax's names, in which a branch and its unit are one key."""
    tree = {"params": {}, "batch_stats": {}}
    for name, tensor in weights.items():
        *outer, kind = name.split(".")
        group = "batch_stats" if kind in ("mean", "var") else "params"
        layer = "Conv_0" if kind == "kernel" or outer[0] == "Logits" else "BatchNorm_0"
        if len(outer) == 3:
            outer = [outer[0], "/".join(outer[1:])]
        elif outer[0] == "Logits":
            outer = ["/".join(outer)]
        node = tree[group]
        for key in (*outer, layer):
            node = node.setdefault(key, {})
        node[kind] = tensor.numpy()
    return tree


def write_i3d(path):
    weights = draw(I3d())
    path.write_bytes(pickle.dumps(i3d_tree(weights), protocol=4))
    return weights


def write_efficientnet(path):
    weights = draw(EfficientNetLite0())
    named = {".".join(p if p[0].isdigit() or p in LEAVES else f"_{p}" for p in n.split(".")): w
             for n, w in weights.items()}  # fmt: skip
    torch.save(named | {"_bn0.num_batches_tracked": torch.tensor(3)}, path)
    return weights


def write_stlpips(path, detector):
    """Write random weights, and return them by the names of the layers and heads alone."""
    network = SHIFT_TOLERANT[detector]
    features = draw(features_of(network, shift_tolerant=True))
    ends, slices = sorted(network.compared), {}
    for name in features:
        place = int(name.partition(".")[0])
        slices[name] = 1 + sum(place > end for end in ends)
    heads = {f"lin{n}": torch.rand(1, c, 1, 1) for n, c in enumerate(network.compared.values())}
    scaling = {
        "shift": torch.tensor([-0.03, -0.09, -0.19]),
        "scale": torch.tensor([0.46, 0.45, 0.44]),
    }
    torch.save(
        {f"scaling_layer.{name}": values.view(1, 3, 1, 1) for name, values in scaling.items()}
        | {f"net.slice{slices[name]}.{name}": tensor for name, tensor in features.items()}
        | {f"{name}.model.1.weight": head for name, head in heads.items()},
        path,
    )
    return features, heads, scaling
