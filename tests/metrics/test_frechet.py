import numpy as np
import pytest

from diagd.metrics.frechet import frechet_distance


def samples(count, dimension, seed, scale=1.0, shift=0.0):
    generator = np.random.default_rng(seed)
    mixing = generator.normal(size=(dimension, dimension))
    return generator.normal(size=(count, dimension)) @ mixing * scale + shift


def by_matrix_root(features, reference):
    """The definition, with a matrix whose square is the product of the covariances."""
    means = [values.mean(axis=0) for values in (features, reference)]
    first, second = (np.cov(values, rowvar=False) for values in (features, reference))
    values, vectors = np.linalg.eig(first @ second)
    root = vectors @ np.diag(np.sqrt(values)) @ np.linalg.inv(vectors)
    assert root @ root == pytest.approx(first @ second, rel=1e-9)
    return np.square(means[0] - means[1]).sum() + np.trace(first + second - 2 * root)


@pytest.mark.parametrize(("count", "other"), [(40, 40), (40, 25), (200, 31)])
def test_the_distance_is_the_one_with_a_general_matrix_root(count, other):
    features, reference = samples(count, 7, seed=0), samples(other, 7, 1, scale=1.7, shift=0.4)
    expected = by_matrix_root(features, reference)
    assert frechet_distance(features, reference) == pytest.approx(expected, rel=1e-9)
    assert expected > 1


def test_one_dimension_is_the_formula_of_two_normal_distributions():
    features, reference = samples(50, 1, 0), samples(60, 1, 1, scale=3.0, shift=2.0)
    means, deviations = zip(
        *((values.mean(), values.std(ddof=1)) for values in (features, reference)), strict=True
    )
    expected = (means[0] - means[1]) ** 2 + (deviations[0] - deviations[1]) ** 2
    assert frechet_distance(features, reference) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("count", [4, 30])
def test_equal_samples_have_no_distance_even_with_a_singular_covariance(count):
    features = samples(count, 9, 0)
    # eigenvalues of a singular matrix are off by 1e-15 of the largest, and roots are taken
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-5)
    shifted = frechet_distance(features + 2.0, features)
    assert shifted == pytest.approx(9 * 4.0, abs=1e-5)


def test_the_distance_is_symmetric_and_takes_float32():
    features = samples(30, 5, 0).astype(np.float32)
    reference = samples(30, 5, 1, 2.0).astype(np.float32)
    forth, back = frechet_distance(features, reference), frechet_distance(reference, features)
    assert forth == pytest.approx(back, rel=1e-9)
