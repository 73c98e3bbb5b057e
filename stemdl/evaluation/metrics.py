"""How far is a reconstruction from the truth? Scores of whole images.

Images come as stacks (N, H, W) in volts, and every score is one number a sample. A projected
potential is known up to a constant only, so the mean of both images is removed first. With t the
truth, r the reconstruction, both of mean zero, sums over all pixels of the scanned field, and
range(t) = max(t) - min(t):

    MAE      mean |r - t|                                   [V]
    RMSE     sqrt(mean (r - t)²)                            [V]
    R-factor sum |r - t| / sum |t|
    PSNR     20 log10(range(t) / RMSE)                      [dB]
    SSIM     Wang et al., IEEE Trans. Image Process. 13, 600 (2004): Gaussian window of 1.5 pixels,
             K1 = 0.01, K2 = 0.03, range(t) as the range; the field is mirrored at its border
    Pearson  sum(r t) / sqrt(sum(r²) sum(t²))
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from stemdl.errors import UserError

Array = NDArray[np.float64]

_SSIM_SIGMA = 1.5  # [pixels]
_SSIM_K1, _SSIM_K2 = 0.01, 0.03


@dataclass(frozen=True)
class Score:
    """What a score is called, and what it means to a reader of the report."""

    key: str
    label: str
    unit: str
    rises: bool  # more is better
    digits: int
    meaning: str


SCORES = (
    Score(
        "pearson", "Pearson correlation", "", True, 3,
        "How well bright and dark agree, whatever the scale: 1 is perfect, 0 is chance.",
    ),
    Score("mae", "MAE", "V", False, 2, "Mean absolute difference from the true potential."),
    Score(
        "rmse", "RMSE", "V", False, 2,
        "Root of the mean squared difference; large errors weigh more than in MAE.",
    ),
    Score(
        "r_factor", "R-factor", "", False, 3,
        "Absolute differences over the absolute true potential, as crystallographers do: 0 is "
        "perfect, a flat image has 1.",
    ),
    Score(
        "psnr", "PSNR", "dB", True, 1,
        "Range of the true potential over RMSE, on a log scale: 20 dB is a tenth of the range.",
    ),
    Score(
        "ssim", "SSIM", "", True, 3,
        "Agreement of local contrast and structure in a small moving window: 1 is perfect.",
    ),
)  # fmt: skip


def score(truth: Array, image: Array, first: int = 0) -> dict[str, Array]:
    """Every score of `SCORES` for each sample: key -> (N,) float64.

    Args:
        truth: true potentials (N, H, W) [V].
        image: reconstructions (N, H, W) [V].
        first: index of the first sample, for messages.

    Raises:
        UserError: an image has NaN or infinity, or a true potential is flat.
    """
    _check(truth, image, first)
    truth, image = _centred(truth), _centred(image)
    pixels = (-2, -1)
    difference = image - truth
    absolute = np.abs(difference)
    rmse = np.sqrt((difference**2).mean(pixels))
    span = np.ptp(truth, axis=pixels)
    with np.errstate(divide="ignore"):  # a perfect image has an infinite PSNR
        psnr = 20 * np.log10(span / rmse)
    return {
        "mae": absolute.mean(pixels),
        "rmse": rmse,
        "r_factor": absolute.sum(pixels) / np.abs(truth).sum(pixels),
        "psnr": psnr,
        "ssim": similarity(truth, image, span).mean(pixels),
        "pearson": pearson(truth, image),
    }


def pearson(truth: Array, image: Array) -> Array:
    """Pearson correlation (N,) of two stacks of images; a flat image correlates with nothing: 0."""
    truth, image = _centred(truth), _centred(image)
    power = np.sqrt((image**2).sum((-2, -1)) * (truth**2).sum((-2, -1)))
    product = (image * truth).sum((-2, -1))
    return np.divide(product, power, out=np.zeros_like(power), where=power > 0)


def similarity(truth: Array, image: Array, span: Array) -> Array:
    """The SSIM map (N, H, W) of two stacks; `span` (N,) is the range of each truth [V]."""

    def local(values: Array) -> Array:
        return gaussian_filter(values, (0, _SSIM_SIGMA, _SSIM_SIGMA), truncate=3.5)

    c1, c2 = ((k * span[:, None, None]) ** 2 for k in (_SSIM_K1, _SSIM_K2))
    mean_t, mean_r = local(truth), local(image)
    variance_t = local(truth**2) - mean_t**2
    variance_r = local(image**2) - mean_r**2
    covariance = local(truth * image) - mean_t * mean_r
    luminance = (2 * mean_t * mean_r + c1) / (mean_t**2 + mean_r**2 + c1)
    return luminance * (2 * covariance + c2) / (variance_t + variance_r + c2)


def fitted(truth: Array, image: Array) -> Array:
    """`image` (N, H, W) of any unit, brought to volts by its best gain and offset for each sample.

    Least squares to the truth itself: no real experiment has this, so it favours the image.
    """
    truth_mean = truth.mean((-2, -1), keepdims=True, dtype=np.float64)
    image = _centred(image)
    power = (image**2).sum((-2, -1), keepdims=True)
    product = (image * (truth - truth_mean)).sum((-2, -1), keepdims=True)
    gain = np.divide(product, power, out=np.zeros_like(power), where=power > 0)
    return gain * image + truth_mean


def _centred(images: Array) -> Array:
    images = images.astype(np.float64)
    return images - images.mean((-2, -1), keepdims=True)


def _check(truth: Array, image: Array, first: int) -> None:
    if truth.shape != image.shape:
        raise ValueError(f"truth is {truth.shape}, reconstruction is {image.shape}")
    for name, images in (("true potential", truth), ("reconstruction", image)):
        broken = ~np.isfinite(images).all((-2, -1))
        if broken.any():
            raise UserError(
                f"sample {first + int(broken.argmax())}: the {name} has NaN or infinite values; "
                "no score is given. Check the data with 'stemdl-data verify', or train again"
            )
    flat = np.ptp(truth, axis=(-2, -1)) == 0
    if flat.any():
        raise UserError(
            f"sample {first + int(flat.argmax())}: the true potential is the same everywhere; "
            "wanted at least one column in the scanned field"
        )
