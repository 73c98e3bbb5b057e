"""Physics of the slice loop, and its equality with abTEM's own."""

import abtem
import dask
import numpy as np
import pytest
from ase import Atoms
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools.multislice import Engine, grid_points, propagate_on_gpu
from data_tools.optics import Optics, detector_weights, scan_positions
from data_tools.specimen import Specimen

BOX, POINTS, THICKNESS = 10.0, 60, 12.0
OPTICS = Optics(energy=100, semi_angle=25, defocus=40, cs=2e4)
ENGINE = Engine(POINTS, BOX)
WHOLE = detector_weights(2 * ENGINE.reach + 1, 1, ENGINE.reach)
POSITIONS = scan_positions((3, 2), 1.3, BOX)


def specimen(seed=0, atoms=40):
    rng = np.random.default_rng(seed)
    positions = rng.uniform(size=(atoms, 3)) * [BOX, BOX, THICKNESS]
    return Specimen(positions, positions, rng.choice([6, 14, 38, 79], atoms), (0, 0, 1))


VACUUM = Specimen(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0, int), (0, 0, 1))


def patterns(of, slices=6, optics=OPTICS, positions=POSITIONS, weights=(WHOLE, WHOLE)):
    potential = ENGINE.potential(of, THICKNESS, slices)
    return ENGINE.patterns(potential, optics, positions, weights)


def test_equal_to_plain_abtem():
    """The same physics as abTEM's documentation teaches it, pixel for pixel."""
    atoms = specimen()
    ours = patterns(atoms)
    potential = abtem.Potential(
        Atoms(atoms.numbers, atoms.positions, cell=[BOX, BOX, THICKNESS], pbc=True),
        gpts=POINTS,
        slice_thickness=THICKNESS / 6,
    )
    probe = abtem.Probe(energy=100e3, semiangle_cutoff=25, defocus=40, Cs=2e4)
    probe.grid.match(potential)
    scan = abtem.CustomScan(POSITIONS)
    with dask.config.set(scheduler="synchronous"):
        detector = abtem.PixelatedDetector(max_angle=None)
        measured = probe.scan(potential, scan=scan, detectors=detector).compute(progress_bar=False)
    middle = slice(POINTS // 2 - ENGINE.reach, POINTS // 2 + ENGINE.reach + 1)
    theirs = measured.array[:, middle, middle]
    assert np.abs(ours - theirs).max() < 2e-5 * theirs.max()
    assert np.corrcoef(ours[0].ravel(), ours[1].ravel())[0, 1] < 0.99  # not all the same


def test_the_path_for_gpus_is_equal_too():
    potential = ENGINE.potential(specimen(), THICKNESS, 6)
    beam = ENGINE._beam(potential, OPTICS)
    entrance = np.stack([beam.probe, beam.probe[::-1] * 1j, np.roll(beam.probe, 3, axis=1)])
    planned = ENGINE._planned.propagate(beam, entrance)
    plain = propagate_on_gpu(beam, entrance)
    np.testing.assert_allclose(planned, plain, atol=2e-6 * np.abs(plain).max())


def test_vacuum_keeps_the_probe():
    found = patterns(VACUUM)
    np.testing.assert_allclose(found.sum(axis=(1, 2)), 1, rtol=1e-5)
    np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), atol=1e-7)
    in_focus = patterns(VACUUM, optics=Optics(100, 25, 0, 0))
    np.testing.assert_allclose(found, in_focus, atol=1e-7)  # aberrations are phases
    disc = found[0] > found[0].max() / 2
    radius = np.sqrt(disc.sum() / np.pi) / BOX
    assert radius == pytest.approx(25e-3 / 0.0370, rel=0.03)


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([60.0, 200.0]), st.floats(0, 30))
def test_beam_is_kept_up_to_the_aperture(seed, energy, angle):
    """Little is scattered beyond the antialias aperture by so few atoms, and none is made."""
    found = patterns(specimen(seed, atoms=8), optics=Optics(energy, 10 + angle / 2, 20, 0))
    total = found.sum(axis=(1, 2))
    assert (total < 1.001).all() and (total > 0.9).all()


def test_thinner_slices_converge():
    ladder = [patterns(specimen(3), slices) for slices in (3, 6, 12, 48)]
    errors = [np.abs(each - ladder[-1]).sum() for each in ladder[:-1]]
    assert errors[0] > errors[1] > errors[2] > 0


@settings(max_examples=6, deadline=None)
@given(st.integers(-30, 30), st.integers(-30, 30))
def test_specimen_and_probe_move_together(dy, dx):
    """By whole pixels of the grid, for the box repeats."""
    shift = np.array([dy, dx]) * BOX / POINTS
    atoms = specimen(5)
    positions = atoms.positions + np.array([*shift, 0])
    moved = Specimen(positions, positions, atoms.numbers, (0, 0, 1))
    here, there = patterns(atoms), patterns(moved, positions=POSITIONS + shift)
    np.testing.assert_allclose(there, here, atol=2e-5 * here.max())


def test_binned_detectors_sum_the_same_electrons():
    weights = detector_weights(7, 3, ENGINE.reach)
    fine, coarse = patterns(specimen()), patterns(specimen(), weights=(weights, weights))
    middle = slice(ENGINE.reach - 10, ENGINE.reach + 11)
    expected = fine[:, middle, middle].reshape(-1, 7, 3, 7, 3).sum(axis=(2, 4))
    np.testing.assert_allclose(coarse, expected, rtol=1e-4, atol=1e-8)


def test_grid_is_fine_enough_and_fast():
    assert grid_points(24, 0.2) == 120
    assert grid_points(24, 0.1999) > 120
    for box in (7.3, 19.9, 50):
        points = grid_points(box, 0.2)
        assert points % 2 == 0 and box / points <= 0.2
