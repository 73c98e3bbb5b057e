"""From patterns to potentials: a split of a data set, or a file of measured patterns.

    stemdl predict runs/demo measured.h5              # one rank
    mpirun -n 2 stemdl predict runs/demo measured.h5  # two share the samples

Potentials are in volts; those of measured patterns have mean zero. Fields that were cut from one
scan are joined again (`mosaic`).
"""

import json
from collections.abc import Callable, Sequence
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
from stemdl.data import pipeline, trained_on
from stemdl.data.normalise import Normaliser, not_finite
from stemdl.data.shards import Split
from stemdl.data.trained_on import TrainedOn
from stemdl.errors import UserError
from stemdl.evaluation import figures, mosaic
from stemdl.evaluation.mosaic import Mosaic
from stemdl.ranks import Ranks
from stemdl.training import checkpoint, devices

FORMAT = "stemdl.prediction/1"
IMPORT = "bring it in with stemdl-data import FILE --to DATA --match RUN (docs/import.md)"

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
            the unit of the training data. Root attributes `scan_step` [Å] and `detector_step`
            [1/Å], where it has them, must be those of the training data.
        to: HDF5 to write: `potential` (N, H, W) float32 [V], each of mean zero, and for each scan
            of which the file holds several fields, `scan/000` (Y, X) float32 [V] and so on. A
            picture goes beside it, with the suffix .png: of the scans, or else the first samples.

    Raises:
        UserError: no trained run, no such file or dataset, or patterns of another shape or
            sampling than the network's.
    """
    with ranks.together(f"reconstructing {file}"):
        if to.resolve() == file.resolve():
            raise UserError(f"{to}: is the file of patterns itself; write to another file (--to)")
        experiment = config.load(run / "config.yaml")
        devices.set_up(experiment.train, experiment.seed, ranks)
        model, normaliser, _ = checkpoint.load_model(run, "best")
        kind = trained_on.load(run)
        found = _reconstruct_file(
            model, normaliser, kind, file, batch=experiment.evaluate.batch, ranks=ranks
        )
    potentials = np.concatenate(ranks.collect(found))
    with ranks.together(f"writing {to}"):
        if ranks.rank == 0:
            pixel = kind.axes.potential_pixel
            scans = list(mosaic.mosaics(potentials, _corners(file, kind)))
            _write(to, potentials, scans, pixel, run=run, source=file)
            shown = {f"scan {number}": each.image for number, each in enumerate(scans)} or {
                f"sample {number}": each for number, each in enumerate(potentials)
            }
            picture = to.with_suffix(".png")
            figures.predictions(picture, shown, pixel)
            many = "s" if len(scans) > 1 else ""
            joined = f", joined to {len(scans)} scan{many}" if scans else ""
            say(f"predict: {len(potentials)} reconstructions{joined} in {to}, picture in {picture}")


def _reconstruct_file(
    model: keras.Model,
    normaliser: Normaliser,
    kind: TrainedOn,
    file: Path,
    *,
    batch: int,
    ranks: Ranks,
) -> NDArray[np.float32]:
    """The potentials (n, H, W) [V] of this rank's share of the file, each of mean zero."""
    apply = reconstructor(model, normaliser)
    wanted = model.input_shape[1:]
    try:
        with h5py.File(file, "r", locking=False) as opened:
            cbed = opened.get("cbed")
            if not isinstance(cbed, h5py.Dataset):
                raise UserError(f"{file}: has no dataset 'cbed', found {sorted(opened)}; {IMPORT}")
            if cbed.shape[-4:] != wanted or cbed.ndim > 5:
                raise UserError(
                    f"{file}: cbed is {cbed.shape}, wanted (samples, {', '.join(map(str, wanted))})"
                    ", the (scan y, scan x, detector ky, kx) that the network was trained for; "
                    f"train a network for this shape, or {IMPORT}"
                )
            trained_on.check(kind, file, opened.attrs)
            count = cbed.shape[0] if cbed.ndim == 5 else 1
            low, high = (count * (ranks.rank + end) // ranks.size for end in (0, 1))
            found = np.empty((high - low, *model.output_shape[1:]), np.float32)
            starts = range(low, high, batch)
            for start in progress(starts, "reconstructing", unit="batch", rank=ranks.rank):
                stop = min(start + batch, high)
                patterns = cbed[start:stop] if cbed.ndim == 5 else cbed[()][None]
                for sample, each in enumerate(patterns, start):
                    if not_finite(each):  # ReLU would make 0 of NaN
                        raise UserError(f"{file}: cbed of sample {sample} holds NaN or infinity")
                found[start - low : stop - low] = apply(normaliser.cbed(patterns))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read as HDF5 ({error.strerror or ' '.join(str(error).split())}); "
            f"if it is in a camera's or another program's format, {IMPORT}"
        ) from error
    broken = ~np.isfinite(found).all((1, 2))
    if broken.any():
        raise UserError(
            f"{file}: the network gives NaN or infinity for sample {low + int(broken.argmax())}; "
            "train again, or compare the patterns' scale with the training data's"
        )
    return found - found.mean((1, 2), keepdims=True)


def _corners(file: Path, kind: TrainedOn) -> NDArray[np.float64]:
    """First potential pixel (N, 2) of each sample in the scan that it was cut from."""
    with h5py.File(file, "r", locking=False) as opened:
        table = opened.get("sample")
        if not isinstance(table, h5py.Dataset) or "scan_start" not in (table.dtype.names or ()):
            return np.zeros((0, 2))
        starts = np.asarray(table.fields("scan_start")[:], np.float64)
        try:
            done = json.loads(opened.attrs.get("provenance", ""))
            ratio = np.array(done["scan_ratio"], np.float64)  # probes of the scan to one of ours
        except (ValueError, KeyError, TypeError):
            ratio = np.ones(2)
    return starts / ratio * kind.axes.scan_step / kind.axes.potential_pixel


def _write(
    path: Path,
    potentials: NDArray[np.float32],
    scans: Sequence[Mosaic],
    pixel: float,
    *,
    run: Path,
    source: Path,
) -> None:
    """The axes are described as in shards (docs/data-format.md); `pixel` is in Å."""
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
                potential_pixel=pixel,
                potential_sampling=(1.0, pixel, pixel),
                potential_units=("", "Å", "Å"),
            )
            for number, scan in enumerate(scans):
                image = opened.create_dataset(f"scan/{number:03d}", data=scan.image, dtype="f4")
                image.attrs.update(
                    unit="V",
                    axes=("y", "x"),
                    pixel=pixel,
                    sampling=(pixel, pixel),
                    units=("Å", "Å"),
                    samples=scan.samples,
                )
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
