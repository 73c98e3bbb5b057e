"""Scores against formulas written another way, and the ways in which they must not change."""

import numpy as np
import pytest
from scipy.stats import pearsonr
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from stemdl.errors import UserError
from stemdl.evaluation import metrics


@pytest.fixture
def pair():
    rng = np.random.default_rng(3)
    truth = rng.normal(20, 5, (4, 24, 30))
    return truth, truth + rng.normal(0, 2, truth.shape) + 7


def test_scores_agree_with_other_libraries(pair):
    truth, image = pair
    scores = metrics.score(truth, image)
    assert set(scores) == {each.key for each in metrics.SCORES}
    for n in range(len(truth)):
        t, r = truth[n] - truth[n].mean(), image[n] - image[n].mean()
        span = t.max() - t.min()
        assert scores["pearson"][n] == pytest.approx(pearsonr(t.ravel(), r.ravel())[0])
        assert scores["psnr"][n] == pytest.approx(peak_signal_noise_ratio(t, r, data_range=span))
        assert scores["mae"][n] == pytest.approx(abs(r - t).mean())
        assert scores["rmse"][n] == pytest.approx(np.std(r - t))
        assert scores["r_factor"][n] == pytest.approx(abs(r - t).sum() / abs(t).sum())
        _, whole = structural_similarity(
            t, r, data_range=span, gaussian_weights=True, use_sample_covariance=False, full=True
        )
        assert scores["ssim"][n] == pytest.approx(whole.mean())


def test_a_constant_is_forgiven_and_a_gain_is_not(pair):
    truth, image = pair
    scores, shifted = metrics.score(truth, image), metrics.score(truth, image - 1000)
    for key, values in scores.items():
        np.testing.assert_allclose(shifted[key], values, rtol=1e-6, err_msg=key)
    louder = metrics.score(truth, 3 * image)
    np.testing.assert_allclose(louder["pearson"], scores["pearson"])
    assert (louder["mae"] > scores["mae"]).all()


def test_perfect_and_flat_images(pair):
    truth, _ = pair
    perfect = metrics.score(truth, truth)
    for key, value in {"mae": 0, "rmse": 0, "r_factor": 0, "ssim": 1, "pearson": 1}.items():
        np.testing.assert_allclose(perfect[key], value, atol=1e-12)
    assert np.isinf(perfect["psnr"]).all()
    flat = metrics.score(truth, np.zeros_like(truth))
    np.testing.assert_allclose(flat["r_factor"], 1)
    np.testing.assert_array_equal(flat["pearson"], 0)


def test_fit_undoes_any_gain_and_offset(pair):
    truth, image = pair
    np.testing.assert_allclose(metrics.fitted(truth, -0.02 * truth + 5), truth)
    # No other gain has a smaller error.
    best = metrics.score(truth, metrics.fitted(truth, image))["rmse"]
    for gain in (0.8, 0.9, 1.0):
        assert (metrics.score(truth, gain * image)["rmse"] >= best - 1e-12).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_reconstruction_gets_no_score(pair, value):
    truth, image = pair
    image[2, 5, 5] = value
    with pytest.raises(UserError, match=r"^sample 12: the reconstruction has NaN"):
        metrics.score(truth, image, first=10)


def test_broken_or_flat_truth_gets_no_score(pair):
    truth, image = pair
    broken = truth.copy()
    broken[1, 0, 0] = np.nan
    with pytest.raises(UserError, match=r"sample 1: the true potential has NaN"):
        metrics.score(broken, image)
    flat = truth.copy()
    flat[3] = 2.0
    with pytest.raises(UserError, match=r"sample 3: the true potential is the same everywhere"):
        metrics.score(flat, image)
