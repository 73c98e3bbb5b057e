"""What the slice loop of data_tools.multislice saves over a plain abTEM script.

    python benchmarks/simulation.py [--samples 12] [--warm-up 2]

Both simulate the same crystals with the same physics and settings (the schema's defaults) on one
core, in turn, so that a slow moment of the machine hits both. The plain script is the one that
abTEM's documentation teaches: Potential, Probe, GridScan, PixelatedDetector, scan, compute. Its
patterns are cropped and binned to the same detector pixels. Target: >= 1.5 times quicker, at equal
output.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import abtem  # noqa: E402
import dask  # noqa: E402
import numpy as np  # noqa: E402
from ase import Atoms  # noqa: E402

from data_tools import sample, structures  # noqa: E402
from data_tools.multislice import grid_points  # noqa: E402
from data_tools.optics import detector_weights, field_start  # noqa: E402
from stemdl import files, schema  # noqa: E402

TARGET = Path(__file__).parent.parent / "build/benchmarks/simulation.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=12, help="crystals to simulate")
    parser.add_argument("--warm-up", type=int, default=2, help="of them, not counted")
    options = parser.parse_args()
    settings = schema.Simulate()
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    differences: dict[str, list[float]] = {"patterns": [], "potential": []}
    for number, scene in enumerate(scenes(settings, options.samples)):
        ours, ours_s = timed(sample.image, scene, settings)
        plain, plain_s = timed(plain_abtem, scene, settings)
        for name, a, b in zip(differences, ours, plain, strict=True):
            differences[name].append(float(np.abs(a - b).max() / np.abs(b).max()))
        if number >= options.warm_up:
            times["ours"].append(ours_s)
            times["plain"].append(plain_s)
        print(f"{scene.formula:16s} ours {ours_s:.3f} s, plain {plain_s:.3f} s", flush=True)
    ours_s, plain_s = (statistics.median(times[name]) for name in ("ours", "plain"))
    result = {
        "samples": len(times["ours"]),
        "ours_s": ours_s,
        "plain_abtem_s": plain_s,
        "ratio": plain_s / ours_s,
        "largest_difference_patterns": max(differences["patterns"]),
        "largest_difference_potential": max(differences["potential"]),
        "settings": settings.model_dump(mode="json"),
    }
    print(
        f"a sample on one core: ours {ours_s:.3f} s, plain abTEM {plain_s:.3f} s, "
        f"{result['ratio']:.2f} times quicker (target >= 1.5); largest difference over the "
        f"brightest pixel {result['largest_difference_patterns']:.1e}, potential "
        f"{result['largest_difference_potential']:.1e}"
    )
    files.write_json(TARGET, "stemdl.benchmark/1", result)
    print(f"wrote {TARGET}")


def scenes(settings: schema.Simulate, count: int) -> list[sample.Scene]:
    """Specimens as the simulation draws them, of different prototypes."""
    catalogue = structures.collect(settings.materials)
    chosen = structures.split(catalogue.materials, settings.materials, settings.seed)["test"]
    recipe = sample.Recipe(settings, {})
    return [
        sample.draw(recipe, material, "test", np.random.default_rng(number))
        for number, material in enumerate(chosen[:count])
    ]


def plain_abtem(scene: sample.Scene, settings: schema.Simulate) -> tuple[np.ndarray, np.ndarray]:
    """The same as sample.image, by abTEM's own interface."""
    box, thickness, optics = settings.box, scene.thickness, scene.optics
    positions = scene.specimen.positions % [box, box, np.inf]
    positions[:, 2] = np.clip(positions[:, 2], 0, np.nextafter(thickness, 0))
    atoms = Atoms(scene.specimen.numbers, positions, cell=[box, box, thickness], pbc=True)
    potential = abtem.Potential(
        atoms,
        gpts=grid_points(box, settings.grid),
        slice_thickness=thickness / sample.slice_count(thickness, settings.slice_thickness),
    )
    probe = abtem.Probe(
        energy=optics.energy * 1e3,
        semiangle_cutoff=optics.semi_angle,
        defocus=optics.defocus,
        Cs=optics.cs,
    )
    probe.grid.match(potential)
    first = [
        field_start(box, count, settings.scan_step) + settings.scan_step / 2
        for count in settings.scan
    ]
    last = [
        start + count * settings.scan_step
        for start, count in zip(first, settings.scan, strict=True)
    ]
    scan = abtem.GridScan(first, last, gpts=settings.scan, endpoint=False)
    with dask.config.set(scheduler="synchronous"):
        measured = probe.scan(
            potential, scan=scan, detectors=abtem.PixelatedDetector(max_angle="cutoff")
        ).compute(progress_bar=False)
        projected = potential.build(lazy=False).array.sum(axis=0, dtype=np.float64)
    patterns = measured.array.reshape(-1, *measured.array.shape[2:])
    reach = (min(patterns.shape[1:]) - 1) // 2
    ky, kx = (detector_weights(count, settings.detector_bin, reach) for count in settings.detector)
    middle = [slice(size // 2 - reach, size // 2 + reach + 1) for size in patterns.shape[1:]]
    return ky @ patterns[:, middle[0], middle[1]] @ kx.T, projected


def timed(function, *arguments):
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
