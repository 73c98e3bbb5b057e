"""What a pattern and a potential look like to the network: zero mean, unit deviation.

    normaliser = measure(open_split("data", "train"), experiment.data, ranks)
    x = normaliser.cbed(patterns)             # numpy arrays or TensorFlow tensors
    volts = normaliser.volts(prediction)

The statistics come from the training split alone and are stored with the run.
"""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stemdl import console, files, schema
from stemdl.data import shards
from stemdl.errors import UserError
from stemdl.ranks import Ranks

FORMAT = "stemdl.normaliser/1"
# Detector pixels that vary less than this part of the liveliest count as dead: their deviation is
# raised to it, so that a dead pixel becomes about 0 and its noise is not blown up.
LEAST_DEVIATION = 1e-3
READ_BYTES = 64 << 20  # read at once while measuring


@dataclass(frozen=True)
class Normaliser:
    """Means and deviations in the units of the network's input and output."""

    sqrt: bool
    cbed_mean: np.ndarray  # (Ky, Kx) or () float32, of the square root if sqrt
    cbed_std: np.ndarray
    potential_mean: float  # [V]
    potential_std: float  # [V]

    def cbed(self, x: Any) -> Any:
        """Normalised float32 patterns from stored ones (..., Ky, Kx) of any dtype."""
        x = _amplitude(x) if self.sqrt else _float(x)
        return (x - self.cbed_mean) / self.cbed_std

    def potential(self, v: Any) -> Any:
        """Normalised potential from v [V]."""
        return (v - self.potential_mean) / self.potential_std

    def volts(self, y: Any) -> Any:
        """Potential [V] from the normalised y."""
        return y * self.potential_std + self.potential_mean


def measure(
    split: shards.Split,
    settings: schema.Data,
    ranks: Ranks,
    moved: Callable[[], object] = lambda: None,
) -> Normaliser:
    """Statistics of a split, read once by all ranks together. The same bits on every rank.

    `moved` is called every READ_BYTES or so: reading all of a large split takes its time.

    Raises:
        UserError: NaN or infinity (names file, dataset and row), no potentials, or no variance.
    """
    if split.potential_shape is None:
        raise UserError(
            f"{split.directory / split.name}: holds no potentials, so nothing to learn from"
        )
    detector: tuple[int, ...] = split.cbed_shape[2:]
    # Count, sum and sum of squares, of the patterns at each detector pixel and of the potential.
    pixels = int(np.prod(detector))
    sums = np.zeros(2 * pixels + 4)
    cbed_sum, cbed_squares, rest = np.split(sums, [pixels, 2 * pixels])
    with ranks.together("statistics of the training split"):
        for cbed, potential in _share(split, ranks, moved):
            for line in cbed:  # a scan line at a time: float64 copies stay small
                x = (_amplitude(line) if settings.sqrt else _float(line)).reshape(-1, pixels)
                x = x.astype(np.float64)
                cbed_sum += x.sum(axis=0)
                cbed_squares += np.einsum("ij,ij->j", x, x)
            v = potential.astype(np.float64).ravel()
            rest += [np.prod(cbed.shape[:2]), v.size, v.sum(), v @ v]
    sums = ranks.total(sums)
    cbed_sum, cbed_squares, rest = np.split(sums, [pixels, 2 * pixels])
    if settings.normalise == "global":
        cbed_sum, cbed_squares = cbed_sum.mean(), cbed_squares.mean()
        detector = ()
    cbed_mean, cbed_std = _moments(rest[0], cbed_sum, cbed_squares)
    potential_mean, potential_std = _moments(rest[1], rest[2], rest[3])
    for what, deviation in (("patterns", cbed_std), ("potentials", potential_std)):
        if not np.max(deviation) > 0:
            raise UserError(f"{split.directory / split.name}: all {what} are the same")
    cbed_std = np.maximum(cbed_std, LEAST_DEVIATION * np.max(cbed_std))
    return Normaliser(
        sqrt=settings.sqrt,
        cbed_mean=cbed_mean.astype(np.float32).reshape(detector),
        cbed_std=cbed_std.astype(np.float32).reshape(detector),
        potential_mean=float(potential_mean),
        potential_std=float(potential_std),
    )


def save(normaliser: Normaliser, path: str | Path) -> None:
    """Write as NumPy's .npz, whole or not at all."""
    with files.appearing(Path(path)) as temporary, open(temporary, "wb") as file:
        np.savez(file, format=FORMAT, **asdict(normaliser))


def load(path: str | Path) -> Normaliser:
    """Read what `save` wrote.

    Raises:
        UserError: the file is missing or is not one of ours.
    """
    try:
        with np.load(path) as file:
            if str(file["format"]) != FORMAT:
                raise UserError(f"{path}: format is {str(file['format'])!r}, wanted {FORMAT!r}")
            return Normaliser(
                sqrt=bool(file["sqrt"]),
                cbed_mean=file["cbed_mean"],
                cbed_std=file["cbed_std"],
                potential_mean=float(file["potential_mean"]),
                potential_std=float(file["potential_std"]),
            )
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: is no file of normalisation statistics ({error})") from error


def not_finite(array: np.ndarray) -> bool:
    """Whether a float array holds NaN or infinity.

    As unsigned integers, these are the largest of their sign: one pass of `max` clears an array
    without negative numbers, much faster than np.isfinite does in float16.
    """
    if array.dtype.kind != "f":
        return False
    order = array.dtype.str[0]
    signed, unsigned = (array.view(f"{order}{kind}{array.itemsize}") for kind in "iu")
    positive, negative = np.array([np.inf, -np.inf], array.dtype).view(unsigned.dtype)
    largest = unsigned.max()
    if largest < positive:
        return False
    return bool(largest >= negative or signed.max() >= positive)


def _share(
    split: shards.Split, ranks: Ranks, moved: Callable[[], object]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's samples of the split, each checked for NaN and infinity."""
    rank, size = split.place(ranks)
    mine = range(split.count * rank // size, split.count * (rank + 1) // size)
    bar = console.progress(None, "statistics", total=len(mine), rank=ranks.rank)
    with bar:
        for shard, start in zip(split.shards, split.starts[:-1], strict=True):
            first, last = max(mine.start - start, 0), min(mine.stop - start, shard.count)
            step = max(1, READ_BYTES // shard.cbed_bytes)
            for low in range(first, last, step):
                rows = np.arange(low, min(low + step, last))
                found = shards.read_samples(shard, rows)
                for row, cbed, potential in zip(rows, *found.values(), strict=True):
                    for name, array in (("cbed", cbed), ("potential", potential)):
                        if not_finite(array):
                            raise odd_number(shard, name, row)
                    yield cbed, potential
                bar.update(len(rows))
                moved()


def odd_number(shard: shards.Shard, name: str, row: int) -> UserError:
    """What to say of a sample that holds NaN or infinity."""
    return UserError(
        f"{shard.path}: {name} row {shard.first + row} holds NaN or infinity; "
        "make the file again or take the sample out"
    )


def _float(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return x.astype(np.float32)
    import tensorflow as tf

    return tf.cast(x, tf.float32)


def _amplitude(x: Any) -> Any:
    """Square root; what noise or background subtraction left below zero counts as zero."""
    if isinstance(x, np.ndarray):
        return np.sqrt(np.maximum(_float(x), 0))
    import tensorflow as tf

    return tf.sqrt(tf.maximum(_float(x), 0.0))


def _moments(count: float, total: Any, squares: Any) -> tuple[Any, Any]:
    """Mean and standard deviation. Rounding may leave a variance a little below zero."""
    mean = total / count
    return mean, np.sqrt(np.maximum(squares / count - mean**2, 0))
