"""One sample: what is where, symmetry, noise, and dependence on the index alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import sample, specimen
from data_tools.multislice import Engine
from data_tools.optics import Optics, detector_weights, scan_positions
from data_tools.specimen import Specimen
from data_tools.structures import Material
from stemdl import schema
from stemdl.errors import UserError

SMALL = {
    "box": 12,
    "grid": 0.25,
    "scan": (8, 8),
    "scan_step": 0.75,
    "detector": (15, 15),
    "thickness": 8,
    "energy": 200,
    "semi_angle": 25,
    "defocus": 0,
    "dtype": "float32",
}
IRON = Material(
    "iron", "A_cI2_229_a", "Fe", 229, np.eye(3) * 2.87, np.array([[0, 0, 0], [0.5] * 3]),
    np.array([26, 26]),
)  # fmt: skip


def small(**changes):
    return schema.Simulate(**(SMALL | changes))


def measured(atoms, of):
    """Potential (H, W), columns and cbed (Sy, Sx, Ky, Kx) of a specimen, noiseless."""
    engine = Engine(48, of.box)
    thickness = of.thickness[0]
    potential = engine.potential(atoms, thickness, 4)
    weights = tuple(detector_weights(k, of.detector_bin, engine.reach) for k in of.detector)
    patterns = engine.patterns(
        potential,
        Optics(of.energy[0], of.semi_angle[0], of.defocus[0], of.cs[0]),
        scan_positions(of.scan, of.scan_step, of.box),
        weights,
    )
    cbed = sample.stored(patterns, of, np.nan, np.random.default_rng(0))
    volts = sample.field_potential(engine.projected(potential), thickness, of)
    return volts, sample.field_columns(specimen.columns(atoms), of), cbed


def at(positions, numbers):
    positions = np.array(positions, float)
    return Specimen(positions, positions, np.array(numbers), (0, 0, 1))


def test_a_heavy_atom_is_at_one_place_in_all_that_is_stored():
    of = small()
    where = np.array([1.9, 4.1])  # (y, x) in the field, from its edge
    atoms = at([[*(where + 3), 4.0], [3.4, 8.9, 4.0]], [79, 6])
    volts, columns, cbed = measured(atoms, of)

    peak = np.unravel_index(volts.argmax(), volts.shape)
    centre = where - of.potential_pixel / 2  # in the potential's coordinates
    np.testing.assert_allclose(np.array(peak) * of.potential_pixel, centre, atol=0.13)
    gold = columns[columns["mean_z"] > 50]
    np.testing.assert_allclose([gold["y"][0], gold["x"][0]], centre, atol=1e-5)

    k = np.arange(15) - 7
    probes = (np.arange(8) + 0.5) * of.scan_step - of.potential_pixel / 2
    outside = np.hypot(k[:, None], k) * 2 / of.box > 1.2 * 25e-3 / 0.0251
    dark = cbed[:, :, outside].sum(axis=-1)
    brightest = [probes[index] for index in np.unravel_index(dark.argmax(), dark.shape)]
    np.testing.assert_allclose(brightest, centre, atol=0.6 * of.scan_step)

    # The beam is drawn towards the nucleus: to +y where the atom is at larger y, and so in x.
    total = cbed.sum(axis=(2, 3))
    toward_y = (cbed.sum(axis=3) @ k) / total
    toward_x = (cbed.sum(axis=2) @ k) / total
    row, column = (int(np.abs(probes - c).argmin()) for c in centre)
    assert toward_y[row - 1, column] > 0.1 and toward_y[row + 1, column] < -0.1
    assert toward_x[row, column - 1] > 0.1 and toward_x[row, column + 1] < -0.1


SYMMETRIES = {
    "flip y": (lambda p: p * [-1, 1, 1], lambda a: a[::-1]),
    "flip x": (lambda p: p * [1, -1, 1], lambda a: a[:, ::-1]),
    "quarter turn": (lambda p: p[:, [1, 0, 2]] * [-1, 1, 1], np.rot90),
    "transpose": (lambda p: p[:, [1, 0, 2]], lambda a: np.swapaxes(a, 0, 1)),
}


@pytest.mark.parametrize("name", SYMMETRIES)
def test_turned_specimen_gives_turned_arrays(name):
    turn_atoms, turn = SYMMETRIES[name]
    of = small(defocus=30, cs=1e4)
    rng = np.random.default_rng(4)
    positions = rng.uniform(size=(40, 3)) * [12, 12, 8]
    numbers = rng.choice([6, 22, 38, 79], 40)
    middle = np.array([6, 6, 0])
    volts, columns, cbed = measured(at(positions, numbers), of)
    turned = turn_atoms(positions - middle) + middle
    volts_2, columns_2, cbed_2 = measured(at(turned, numbers), of)

    # The grid itself is not symmetric: atoms lie between its points elsewhere.
    assert np.abs(volts - turn(volts)).max() > 5
    np.testing.assert_allclose(volts_2, turn(volts), atol=0.02 * volts.max())
    both = turn(np.moveaxis(turn(cbed), (0, 1), (2, 3)))
    both = np.moveaxis(both, (0, 1), (2, 3))
    assert np.abs(cbed - both).max() > 0.3 * cbed.max()
    np.testing.assert_allclose(cbed_2, both, atol=0.02 * cbed.max())
    edge = 24 * of.potential_pixel - of.potential_pixel
    for record in columns:
        place = turn_atoms(np.array([[record["y"], record["x"], 0]]) - edge / 2) + edge / 2
        distance = np.hypot(columns_2["y"] - place[0, 0], columns_2["x"] - place[0, 1])
        assert distance.min() < 1e-4


@settings(max_examples=20, deadline=None)
@given(st.integers(-5, 5), st.integers(-5, 5), st.floats(0, 0.5), st.floats(0, 6))
def test_potential_is_resampled_and_blurred_exactly(ky, kx, blur, phase):
    of = small(potential_blur=blur)
    y, x = np.meshgrid(*[np.arange(48) * 0.25] * 2, indexing="ij")
    wave = np.cos(2 * np.pi * (ky * y + kx * x) / 12 + phase)
    centres = 3 + (np.arange(24) + 0.5) * 0.25
    y, x = np.meshgrid(centres, centres, indexing="ij")
    k2 = (ky**2 + kx**2) / 12**2
    expected = np.cos(2 * np.pi * (ky * y + kx * x) / 12 + phase)
    expected *= np.exp(-2 * np.pi**2 * blur**2 * k2) / 8
    np.testing.assert_allclose(sample.field_potential(wave, 8.0, of), expected, atol=1e-6)


def test_potential_is_of_the_size_of_a_mean_inner_potential():
    volts, _, _ = measured(specimen_of_iron(), small())
    assert 15 < volts.mean() < 35  # iron, independent atoms


def specimen_of_iron():
    rng = np.random.default_rng(0)
    return specimen.cut(IRON.lattice, IRON.fractional, IRON.numbers, (0, 0, 1), 12, 8, 0.0, rng)


def test_columns_outside_the_field_count_as_neighbours_only():
    """The field is 3 to 9 Å in a box of 12 Å."""
    atoms = at([[2.7, 5, 4], [3.1, 5, 4], [8.9, 8.9, 4], [9.1, 3, 4]], [26, 26, 26, 26])
    columns = sample.field_columns(specimen.columns(atoms), small())
    np.testing.assert_allclose(columns["y"], [3.1 - 3 - 0.125, 8.9 - 3 - 0.125], atol=1e-6)
    np.testing.assert_allclose(columns["nearest"], [0.4, 5.9034], atol=1e-4)


def test_a_sample_depends_on_its_index_alone():
    recipe = sample.Recipe(small(), {"Fe": "train"})
    first = sample.simulate_sample(recipe, IRON, "train", 6)
    other = sample.simulate_sample(recipe, IRON, "train", 9)
    again = sample.simulate_sample(recipe, IRON, "train", 6)
    for key in ("cbed", "potential", "columns", "record"):
        assert getattr(first, key).tobytes() == getattr(again, key).tobytes()
        assert getattr(first, key).tobytes() != getattr(other, key).tobytes()
    assert (first.record["seed"], first.record["index"]) == (0, 6)


def test_settings_are_drawn_from_their_ranges():
    of = small(
        energy=(80, 200), semi_angle=(15, 25), defocus=(-50, 50), cs=(0, 1e5), thickness=(4, 8),
        dose=(1e3, 1e5),
    )  # fmt: skip
    recipe = sample.Recipe(of, {"Fe": "train"})
    records = [sample.simulate_sample(recipe, IRON, "train", index).record for index in range(6)]
    for key in ("energy", "semi_angle", "defocus", "cs", "thickness", "dose"):
        low, high = getattr(of, key)
        values = np.array([record[key] for record in records])
        assert (values >= low).all() and (values <= high).all() and len(set(values)) == 6


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_substituted_formulas_belong_to_the_split(split):
    of = small(
        scan=(1, 1), thickness=2, materials={"substitute": 1, "dev_fraction": 0.3,
        "test_fraction": 0.3},
    )  # fmt: skip
    recipe = sample.Recipe(of, {"Fe": split})
    made = [sample.simulate_sample(recipe, IRON, split, index).record for index in range(8)]
    formulas = {record["formula"].item().decode() for record in made}
    assert len(formulas) > 1
    for formula in formulas:
        found = sample.split_of_formula(formula, recipe.natural, of.materials, of.seed)
        assert found == split


def test_noise_is_poisson_around_the_noiseless_pattern():
    patterns = np.random.default_rng(0).random((4, 5, 5)) / 25
    of = small(scan=(2, 2), dose=1e4)
    dose, rng = 1e4, np.random.default_rng(1)
    noisy = np.stack([sample.stored(patterns, of, dose, rng) for _ in range(400)])
    clean = sample.stored(patterns, of, np.nan, rng)
    beam = dose * of.scan_step**2
    np.testing.assert_allclose(noisy.mean(axis=0), clean, rtol=0.1, atol=0.01)
    np.testing.assert_allclose(noisy.var(axis=0), clean * 25 / beam, rtol=0.5, atol=1e-4)
    counts = sample.stored(patterns, small(scan=(2, 2), dose=1e4, dtype="uint16"), dose, rng)
    assert counts.dtype == np.uint16
    np.testing.assert_allclose(counts.sum(), beam * patterns.sum(), rtol=0.05)


@pytest.mark.parametrize(("dtype", "dose"), [("uint16", 1e7), ("float16", np.nan)])
def test_pixels_too_bright_for_the_dtype_are_refused(dtype, dose):
    of = small(scan=(1, 1), dose=1e7, dtype=dtype)
    bright = np.zeros((1, 300, 300), np.float32)
    bright[0, 5, 5] = 0.9
    with pytest.raises(UserError, match=f"{dtype} holds values up to"):
        sample.stored(bright, of, dose, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"detector": (41, 41)}, r"simulate\.detector: 41 pixels .* finer grid"),
        ({"semi_angle": 90}, r"simulate\.semi_angle: 90 mrad .* finer grid"),
        ({"scan": (20, 8)}, r"simulate\.scan: 20 positions .* wider than simulate\.box"),
        ({"potential_pixel": 0.35}, r"simulate\.potential_pixel: .* wanted a whole number"),
    ],
)
def test_settings_that_do_not_go_together(changes, message):
    sample.check(small())
    with pytest.raises(UserError, match=message):
        sample.check(small(**changes))
