"""From patterns to potentials: a split of a data set, or a file of measured patterns.

stemdl predict runs/demo measured.h5              # one rank
mpirun -n 2 stemdl predict runs/demo measured.h5  # two share the samples
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

import stemdl
from stemdl import config, files, schema
from stemdl.console import progress, say
from stemdl.data import pipeline
from stemdl.data.normalise import Normaliser
from stemdl.data.shards import Split
from stemdl.errors import UserError
from stemdl.evaluation import figures
from stemdl.ranks import Ranks
from stemdl.training import checkpoint, devices

FORMAT = "stemdl.prediction/1"

Reconstructor = Callable[[Any], NDArray[np.float32]]


def reconstructor(model: keras.Model, normaliser: Normaliser) -> Reconstructor:
    """A function from normalised patterns (B, Sy, Sx, Ky, Kx) to potentials (B, H, W) [V]."""
    signature = tf.TensorSpec((None, *model.input_shape[1:]), tf.float32)

    @tf.function(input_signature=[signature])
    def volts(cbed: tf.Tensor) -> tf.Tensor:
        return normaliser.volts(model(cbed, training=False))

    return lambda cbed: volts(cbed).numpy()


def reconstruct(
    model: keras.Model,
    normaliser: Normaliser,
    split: Split,
    settings: schema.Data,
    *,
    batch: int,
    ranks: Ranks,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """This rank's part of a split: indices (n,) of its samples, and their potentials (n, H, W) [V].

    Each sample is on one rank. No collective: ranks may run it at their own pace.
    """
    apply = reconstructor(model, normaliser)
    indices, found = [], []
    batches = pipeline.evaluation(split, normaliser, settings, batch=batch, ranks=ranks)
    for each in progress(batches, "reconstructing", unit="batch", rank=ranks.rank):
        real = each["weight"].numpy() > 0
        indices.append(each["index"].numpy()[real])
        found.append(apply(each["cbed"])[real])
    return np.concatenate(indices).astype(np.int64), np.concatenate(found)


def predict(run: Path, file: Path, to: Path, ranks: Ranks) -> None:
    """Reconstruct every sample of `file` with the best weights of `run`.

    Args:
        run: a trained run.
        file: HDF5 with a dataset `cbed` (N, Sy, Sx, Ky, Kx), or (Sy, Sx, Ky, Kx) for one sample, in
            the unit of the training data. A root attribute `scan_step` [Å] gives the scale.
        to: HDF5 to write: `potential` (N, H, W) float32 [V], each of mean zero. A picture of the
            first samples goes beside it, with the suffix .png.

    Raises:
        UserError: no trained run, no such file or dataset, or patterns of another shape than the
            network's.
    """
    with ranks.together(f"reconstructing {file}"):
        if to.resolve() == file.resolve():
            raise UserError(f"{to}: is the file of patterns itself; write to another file (--to)")
        experiment = config.load(run / "config.yaml")
        devices.set_up(experiment.train, experiment.seed, ranks)
        model, normaliser, _ = checkpoint.load_model(run, "best")
        found, scan_step = _reconstruct_file(model, normaliser, file, experiment, ranks)
    potentials = np.concatenate(ranks.collect(found))
    with ranks.together(f"writing {to}"):
        if ranks.rank == 0:
            pixel = None if scan_step is None else scan_step * _upsampling(model)
            _write(to, potentials, pixel, run=run, source=file)
            figures.predictions(to.with_suffix(".png"), potentials, pixel)
    say(
        f"predict: {len(potentials)} reconstructions in {to}, picture in {to.with_suffix('.png')}",
        rank=ranks.rank,
    )


def _reconstruct_file(
    model: keras.Model,
    normaliser: Normaliser,
    file: Path,
    experiment: schema.Experiment,
    ranks: Ranks,
) -> tuple[NDArray[np.float32], float | None]:
    """This rank's share of the file (n, H, W) [V], mean removed; and the scan step [Å] if known."""
    apply = reconstructor(model, normaliser)
    wanted, batch = model.input_shape[1:], experiment.evaluate.batch
    try:
        with h5py.File(file, "r", locking=False) as opened:
            cbed = opened.get("cbed")
            if not isinstance(cbed, h5py.Dataset):
                raise UserError(f"{file}: has no dataset 'cbed', found {sorted(opened)}")
            if cbed.shape[-4:] != wanted or cbed.ndim > 5:
                raise UserError(
                    f"{file}: cbed is {cbed.shape}, wanted (samples, {', '.join(map(str, wanted))})"
                    ", the (scan y, scan x, detector ky, kx) that the network was trained for; "
                    "crop or bin the patterns, or train a network for this shape"
                )
            count = cbed.shape[0] if cbed.ndim == 5 else 1
            low, high = (count * (ranks.rank + end) // ranks.size for end in (0, 1))
            found = np.empty((high - low, *model.output_shape[1:]), np.float32)
            starts = range(low, high, batch)
            for start in progress(starts, "reconstructing", unit="batch", rank=ranks.rank):
                stop = min(start + batch, high)
                patterns = cbed[start:stop] if cbed.ndim == 5 else cbed[()][None]
                found[start - low : stop - low] = apply(normaliser.cbed(patterns))
            step = opened.attrs.get("scan_step")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read as HDF5 ({error.strerror or ' '.join(str(error).split())})"
        ) from error
    broken = ~np.isfinite(found).all((1, 2))
    if broken.any():
        raise UserError(
            f"{file}: the reconstruction of sample {low + int(broken.argmax())} has NaN or "
            "infinite values; look for NaN in its patterns"
        )
    return found - found.mean((1, 2), keepdims=True), None if step is None else float(step)


def _upsampling(model: keras.Model) -> float:
    """Potential pixels are this part of a scan step."""
    return model.input_shape[1] / model.output_shape[1]


def _write(
    path: Path, potentials: NDArray[np.float32], pixel: float | None, *, run: Path, source: Path
) -> None:
    """The axes are described as in shards (docs/data-format.md), if the pixel [Å] is known."""
    try:
        with files.appearing(path) as temporary, h5py.File(temporary, "w") as opened:
            opened.create_dataset("potential", data=potentials)
            opened.attrs.update(
                format=FORMAT,
                creator=f"stemdl predict {stemdl.__version__}",
                run=str(run),
                source=str(source),
                potential_unit="V",
                potential_axes=("sample", "y", "x"),
            )
            if pixel is not None:
                opened.attrs.update(
                    potential_pixel=pixel,
                    potential_sampling=(1.0, pixel, pixel),
                    potential_units=("", "Å", "Å"),
                )
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
