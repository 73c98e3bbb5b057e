"""Reconstructed fields of a large scan, joined to one image of all that was scanned.

    for mosaic in mosaics(potentials, corners):
        mosaic.image, mosaic.samples

The potential of a field is known up to a constant. Fields that overlap tell each other's: the
levels are those with the least squares of differences where fields overlap, of mean zero. Then
fields are blended with weights that fall towards their edges, where a network sees one side only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, sparse

Image = NDArray[np.float64]


@dataclass(frozen=True)
class Mosaic:
    """One scan. `image` (Y, X) [V] of mean zero, NaN where no field lies."""

    image: Image
    samples: NDArray[np.int64]  # its fields' numbers in the file


def scans(starts: NDArray[np.number]) -> list[NDArray[np.int64]]:
    """The samples of each scan of more than one field, from first probes (N, 2) in file order.

    Fields of a scan come in order, the first one at probe (0, 0).
    """
    begins = np.flatnonzero(~np.any(starts, axis=1))
    groups = np.split(np.arange(len(starts)), begins[begins > 0])
    return [group for group in groups if len(group) > 1]


def mosaics(potentials: NDArray[np.floating], corners: NDArray[np.floating]) -> Iterator[Mosaic]:
    """A mosaic of each scan of more than one field.

    Args:
        potentials: (N, H, W) [V].
        corners: of each field's first pixel in its scan, (N, 2) (y, x) in pixels, not always whole.
    """
    for samples in scans(corners):
        places = corners[samples] - corners[samples].min(0)
        yield Mosaic(join(potentials[samples], places), samples)


def join(fields: NDArray[np.floating], corners: NDArray[np.floating]) -> Image:
    """The image of one scan from its `fields` (N, H, W) at `corners` (N, 2) >= 0 [pixels]."""
    shape = np.array(fields.shape[1:])
    whole = np.floor(corners + 0.5).astype(int)
    fields = np.stack([_moved(*each) for each in zip(fields, corners - whole, strict=True)])
    fields = fields + _levels(fields, whole)[:, None, None]
    weight = _taper(shape[0])[:, None] * _taper(shape[1])
    total = np.zeros(whole.max(0) + shape)
    weights = np.zeros_like(total)
    for field, (y, x) in zip(fields, whole, strict=True):
        place = np.s_[y : y + shape[0], x : x + shape[1]]
        total[place] += weight * field
        weights[place] += weight
    image = np.divide(total, weights, out=np.full_like(total, np.nan), where=weights > 0)
    return image - np.nanmean(image)


def _moved(field: NDArray[np.floating], by: NDArray[np.floating]) -> Image:
    """The field moved by a part of a pixel (y, x), with cubic splines."""
    if not np.any(by):
        return np.asarray(field, np.float64)
    return ndimage.shift(np.asarray(field, np.float64), by, order=3, mode="nearest")


def _levels(fields: Image, corners: NDArray[np.int64]) -> Image:
    """What to add to each field (N,): least squares of the differences where they overlap."""
    shape = np.array(fields.shape[1:])
    rows, differences = [], []
    for first in range(len(fields)):
        apart = corners[first + 1 :] - corners[first]
        for second in first + 1 + np.flatnonzero((np.abs(apart) < shape).all(1)):
            low = np.maximum(corners[first], corners[second])
            high = np.minimum(corners[first], corners[second]) + shape
            parts = [
                fields[each][tuple(map(slice, low - corners[each], high - corners[each]))]
                for each in (first, second)
            ]
            weight = parts[0].size ** 0.5
            rows.append((first, second, weight))
            differences.append(weight * (parts[1].mean() - parts[0].mean()))
    if not rows:
        return np.zeros(len(fields))
    number = np.repeat(np.arange(len(rows)), 2)
    columns = [each for first, second, _ in rows for each in (first, second)]
    values = [sign * weight for _, _, weight in rows for sign in (1, -1)]
    matrix = sparse.csr_array((values, (number, columns)), (len(rows), len(fields)))
    # Of the solutions that differ by a constant, the one without: the shortest.
    return sparse.linalg.lsqr(matrix, np.array(differences), atol=1e-10, btol=1e-10)[0]


def _taper(count: int) -> Image:
    """Weights (count,) that rise from the edges to the middle."""
    return np.minimum(np.arange(count), np.arange(count)[::-1]) + 0.5
