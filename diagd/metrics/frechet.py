"""Frechet distance between samples of features, and options of FVD; no torch."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MIN_FRAMES = 10  # I3D halves time three times and pools the rest: shorter clips give no features

# crop: the short side to 224 px, then the centre; stretch: straight to 224 x 224 px;
# detector: pixels in [0, 255] as they are, scaled and stretched by the TorchScript itself
Preprocessing = Literal["crop", "stretch", "detector"]
Features = NDArray[np.floating[Any]]


def frechet_distance(features: Features, reference: Features) -> float:
    """Return the squared Frechet distance of (N, D) to (M, D); few vectors bias it upwards."""
    (mean, covariance), (other_mean, other) = _moments(features), _moments(reference)
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ other @ root)
    distance = (
        np.square(mean - other_mean).sum()
        + np.trace(covariance)
        + np.trace(other)
        - 2 * np.sqrt(cross.clip(min=0)).sum()
    )
    return max(0.0, float(distance))  # equal samples differ by rounding


def _moments(features: Features) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean (D,) and covariance (D, D)."""
    values = features.astype(np.float64)
    centred = values - values.mean(axis=0)
    return values.mean(axis=0), centred.T @ centred / (len(values) - 1)
