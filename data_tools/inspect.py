"""What is in a data set or a shard: table, statistics, figure; and whether all of it is whole."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stemdl import files
from stemdl.data import copying, manifest, shards
from stemdl.data.shards import Shard
from stemdl.errors import UserError

SHOWN = 10  # samples of a shard in the table
DRAWN = 4  # samples in the figure
BRIGHT = 1.0  # bright field: up to this part of the convergence angle; dark field: beyond 1.5
DARK = 1.5


def shard_paths(path: Path) -> list[Path]:
    """The shard itself, or all shards below a data directory in the order of their names.

    Raises:
        UserError: nothing is there.
    """
    if path.is_file():
        return [path]
    found = sorted(path.glob("*/*.h5")) or sorted(path.glob("*.h5"))
    if not found:
        copies = [each for up in ("*", "*/*") for each in path.glob(f"{up}/{shards.DEAL_NAME}")]
        raise UserError(
            f"{path}: no shard file, and no directory with shards (*.h5, */*.h5)"
            + (f"; staged copies are in {copies[0].parent}" if copies else "")
        )
    return found


def check_manifest(path: Path, found: list[Path]) -> str:
    """Compare a data directory with its manifest, or copies on a node with what was staged.

    Returns:
        A line about it.

    Raises:
        UserError: a listed shard is missing or differs, or a shard is not listed.
    """
    deal = shards.read_deal(path) if path.is_dir() else None
    if deal is not None:
        _check_copies(path, deal)
        return f"all that node {deal['node']} of {deal['nodes']} needs, as it was staged"
    records = manifest.read_manifest(path) if path.is_dir() else None
    if records is None:
        return "no manifest"
    listed = {path / record["path"]: record for record in records}
    for missing in sorted(listed.keys() - set(found)):
        raise UserError(f"{missing}: is in {manifest.NAME} but missing; make or copy it again")
    for extra in sorted(set(found) - listed.keys()):
        raise UserError(f"{extra}: is not in {manifest.NAME}; remove it or make the manifest again")
    for shard, record in listed.items():
        if manifest.checksum(shard) != record["checksum"]:
            raise UserError(f"{shard}: differs from {manifest.NAME}; make or copy it again")
    return f"all as in {manifest.NAME}"


def _check_copies(path: Path, deal: dict[str, Any]) -> None:
    """Every shard that the node needs is there, and is what was copied, byte by byte."""
    for split, rows in deal["splits"].items():
        for name, *_ in rows:
            copying.check_copy(path / split / name)


def describe(path: Path) -> Iterator[str]:
    """Lines about each shard below `path`; with a table of samples when it is one file.

    Raises:
        UserError: no shards, or one cannot be read.
    """
    paths = shard_paths(path)
    total = 0
    for each in paths:
        shard = shards.open_shard(each)
        total += shard.count
        yield _header(shard, with_axes=each is paths[0])
    if len(paths) == 1:
        yield from _table(shards.open_shard(path if path.is_file() else paths[0]))
    else:
        yield f"{len(paths)} shards, {total} samples; name one shard for its table of samples"


def draw(path: Path, png: Path) -> None:
    """A figure of some samples, spread over all shards: mean pattern, virtual bright and dark
    field, and the potential with its atomic columns.
    """
    from matplotlib.figure import Figure

    chosen = _spread([shards.open_shard(each) for each in shard_paths(path)], DRAWN)
    figure = Figure(figsize=(12, 3.1 * len(chosen)), layout="constrained")
    grid = figure.subplots(len(chosen), 4, squeeze=False)
    for axes, (shard, row) in zip(grid, chosen, strict=True):
        _draw_sample(axes, shard, row)
    with files.appearing(png) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def virtual_fields(
    cbed: np.ndarray, detector_step: float, aperture: float
) -> tuple[np.ndarray, np.ndarray]:
    """Virtual bright field (within the aperture) and annular dark field (beyond 1.5 of it).

    Args:
        cbed: (Sy, Sx, Ky, Kx), optic axis in the middle.
        detector_step: [1/Å].
        aperture: radius of the bright-field disc [1/Å].

    Returns:
        Two (Sy, Sx) float32 images: parts of the pattern's sum.
    """
    ky, kx = (np.arange(size) - (size - 1) / 2 for size in cbed.shape[2:])
    radius = np.hypot(ky[:, None], kx) * detector_step / aperture
    patterns = cbed.astype(np.float32)
    total = np.maximum(patterns.sum(axis=(2, 3)), np.finfo(np.float32).tiny)
    bright = patterns[..., radius <= BRIGHT].sum(axis=-1) / total
    return bright, patterns[..., radius >= DARK].sum(axis=-1) / total


def _header(shard: Shard, with_axes: bool) -> str:
    size = files.human_bytes(shard.path.stat().st_size)
    shape = " x ".join(map(str, shard.cbed_shape))
    line = f"{shard.path}: {shard.count} samples, cbed {shape} {shard.cbed_dtype}, {size}"
    if not with_axes:
        return line
    axes = shard.axes
    potential = (
        "none"
        if shard.potential_shape is None
        else f"{' x '.join(map(str, shard.potential_shape))} of {axes.potential_pixel:g} Å, "
        f"blurred by {axes.potential_blur:g} Å"
    )
    return (
        f"{line}\n  cbed in {shard.cbed_unit}; scan step {axes.scan_step:g} Å, "
        f"detector step {axes.detector_step:.4f} 1/Å\n  potential {potential}\n"
        f"  provenance: {shard.provenance or 'unknown'}"
    )


def _table(shard: Shard) -> Iterator[str]:
    head = "row  formula         zone axis   thickness [Å]  mean Z  columns  mean of cbed  highest"
    yield head + ("  potential [V]" if shard.potential_shape else "")
    table = shards.read_table(shard)
    for row in range(min(shard.count, SHOWN)):
        sample = shards.read_samples(shard, [row])
        cbed, record = sample["cbed"].astype(np.float32), table[row]
        line = (
            f"{row:3d}  {record['formula'].decode():14.14s}  "
            f"{' '.join(f'{index:2d}' for index in record['zone_axis']):10s}  "
            f"{record['thickness']:13.1f}  {record['mean_z']:6.1f}  "
            f"{len(shards.read_columns(shard, row)):7d}  {cbed.mean():12.4g}  {cbed.max():7.4g}"
        )
        if "potential" in sample:
            volts = sample["potential"]
            line += f"  {volts.min():.1f} to {volts.max():.1f}"
        yield line
    if shard.count > SHOWN:
        yield f"... {shard.count - SHOWN} more"


def _spread(all_shards: list[Shard], count: int) -> list[tuple[Shard, int]]:
    places = [(shard, row) for shard in all_shards for row in range(shard.count)]
    wanted = np.linspace(0, len(places) - 1, min(count, len(places))).astype(int)
    return [places[place] for place in wanted]


def _draw_sample(axes: np.ndarray, shard: Shard, row: int) -> None:
    from stemdl.electrons import spatial_frequency

    sample, record = shards.read_samples(shard, [row]), shards.read_table(shard)[row]
    cbed, step = sample["cbed"][0], shard.axes.detector_step
    ky, kx = (size * step / 2 for size in cbed.shape[2:])
    mean = cbed.mean(axis=(0, 1), dtype=np.float64)
    axes[0].imshow(np.sqrt(mean), extent=(-kx, kx, ky, -ky), cmap="magma")
    axes[0].set(title=f"{record['formula'].decode()}: √ mean pattern", xlabel="kx [1/Å]")
    height, width = (size * shard.axes.scan_step for size in cbed.shape[:2])
    field = (0, width, height, 0)
    known = record["semi_angle"] > 0 and record["energy"] > 0
    aperture = spatial_frequency(record["semi_angle"], record["energy"]) if known else ky / 2
    images = virtual_fields(cbed, step, aperture)
    for axis, image, title in zip(axes[1:3], images, ("bright field", "dark field"), strict=True):
        axis.imshow(image, extent=field, cmap="gray")
        axis.set(title=f"virtual {title}", xlabel="x [Å]")
    if "potential" not in sample:
        axes[3].set_axis_off()
        return
    shown = axes[3].imshow(sample["potential"][0], extent=field, cmap="inferno")
    axes[3].figure.colorbar(shown, ax=axes[3], label="V")
    columns, half = shards.read_columns(shard, row), shard.axes.potential_pixel / 2
    axes[3].plot(columns["x"] + half, columns["y"] + half, "c.", markersize=3)
    axes[3].set(title="potential and columns", xlabel="x [Å]")
