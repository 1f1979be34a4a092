"""Frechet distance between feature samples, and options of FVD; no torch."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# I3D halves time three times and pools the rest in pairs: shorter clips have no features
I3D_FRAMES, MIN_FRAMES = 9, 10  # our I3D rounds up, as the published one; others do not
PUBLISHED_FRAMES = 16  # of FVD in papers

# crop: the short side to 224 px, then the centre; stretch: directly to 224 x 224 px;
# detector: pixels in [0, 255] unchanged, scaled and stretched by the TorchScript itself
Preprocessing = Literal["crop", "stretch", "detector"]
Features = NDArray[np.floating[Any]]


def frechet_distance(features: Features, reference: Features) -> float:
    """Return the squared Frechet distance of (N, D) to (M, D); few vectors bias it upwards."""
    both = features, reference
    mean, other_mean = (one.mean(axis=0, dtype=np.float64) for one in both)
    covariance, other = (np.atleast_2d(np.cov(one, rowvar=False, dtype=np.float64)) for one in both)
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ other @ root)
    spreads = np.trace(covariance) + np.trace(other) - 2 * np.sqrt(cross.clip(min=0)).sum()
    distance = np.square(mean - other_mean).sum() + spreads
    return max(0.0, float(distance))  # rounding errors of equal samples
