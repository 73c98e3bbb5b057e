"""Substitution, zone axes, cuts and atomic columns."""

import numpy as np
import pytest
from ase.data import covalent_radii
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from data_tools import specimen
from data_tools.structures import Material, contacts

FCC = [[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]
BCC = [[0, 0, 0], [0.5, 0.5, 0.5]]


def crystal(lattice, fractional, numbers):
    return Material(
        "m", "p", "f", 1, np.array(lattice, float), np.array(fractional, float), np.array(numbers)
    )


def cubic(edge, fractional, numbers):
    return crystal(np.eye(3) * edge, fractional, numbers)


PEROVSKITE = cubic(
    3.905, [[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], [38, 22, 8, 8, 8]
)
QUARTZ_LIKE = crystal([[4.9, 0, 0], [-2.45, 4.24, 0], [0, 0, 5.4]], [[0.47, 0, 0]], [14])


def cut(material, zone_axis, *, box=20.0, thickness=30.0, displacement=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return specimen.cut(
        material.lattice,
        material.fractional,
        material.numbers,
        zone_axis,
        box,
        thickness,
        displacement,
        rng,
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_substitution_keeps_contacts_physical(seed):
    lattice, numbers = specimen.substitute(PEROVSKITE, np.random.default_rng(seed))
    tightness = []
    for cell, chosen in ((PEROVSKITE.lattice, PEROVSKITE.numbers), (lattice, numbers)):
        pairs, shortest = contacts(cell, PEROVSKITE.fractional, chosen)
        tightness.append((shortest / covalent_radii[pairs].sum(axis=1)).min())
    assert tightness[0] == pytest.approx(tightness[1])
    assert set(numbers) <= set(specimen.ELEMENTS)
    assert len(np.unique(numbers)) == 3  # different elements stay different
    ratio = covalent_radii[numbers] / covalent_radii[PEROVSKITE.numbers]
    assert (ratio <= specimen.LIKE_SIZE).all() and (ratio >= 1 / specimen.LIKE_SIZE).all()


def test_an_element_without_its_like_stays():
    hydride = cubic(3, BCC, [46, 1])
    _, numbers = specimen.substitute(hydride, np.random.default_rng(0))
    assert numbers[1] == 1


@pytest.mark.parametrize(
    ("sites", "zone_axis", "period"),
    [
        (FCC, (0, 0, 1), 1),
        (FCC, (1, 1, 0), np.sqrt(1 / 2)),
        (FCC, (1, 1, 2), np.sqrt(6) / 2),
        (FCC, (1, 1, 1), np.sqrt(3)),
        (BCC, (1, 1, 1), np.sqrt(3) / 2),
        (BCC, (1, 1, 0), np.sqrt(2)),
    ],
)
def test_periods_along_zone_axes_know_centred_lattices(sites, zone_axis, period):
    axes, lengths = specimen.zone_axes(cubic(4, sites, [29] * len(sites)), largest=2)
    assert lengths[(axes == zone_axis).all(axis=1)] == pytest.approx(4 * period)
    assert all(np.gcd.reduce(axis) == 1 for axis in axes)


def test_ordered_alloy_repeats_later_than_its_lattice():
    axes, lengths = specimen.zone_axes(cubic(4, BCC, [55, 17]), largest=1)
    assert lengths[(axes == (1, 1, 1)).all(axis=1)] == pytest.approx(4 * np.sqrt(3))


def test_dense_axes_are_drawn_more_often():
    copper = cubic(3.6, FCC, [29] * 4)
    rng = np.random.default_rng(0)
    drawn = [tuple(sorted(map(abs, specimen.draw_zone_axis(copper, 2, rng)))) for _ in range(400)]
    axes, lengths = specimen.zone_axes(copper, 2)
    weights = lengths**-4 / (lengths**-4).sum()
    for family in ((0, 1, 1), (0, 0, 1), (0, 1, 2)):
        expected = weights[[tuple(sorted(map(abs, axis))) == family for axis in axes]].sum()
        assert drawn.count(family) / 400 == pytest.approx(expected, abs=0.08)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(0, 0, 1), (1, 1, 0), (1, -1, 2), (2, 0, 1)]),
    st.integers(0, 10**6),
    st.sampled_from([PEROVSKITE, QUARTZ_LIKE]),
)
def test_a_cut_is_the_whole_crystal_turned(zone_axis, seed, material):
    found = cut(material, zone_axis, seed=seed)
    density = len(material.numbers) / abs(np.linalg.det(material.lattice))
    assert len(found.numbers) == pytest.approx(density * 20 * 20 * 30, rel=0.3)  # the edges count
    assert (found.ideal >= 0).all() and (found.ideal < [20, 20, 30]).all()
    shortest = contacts(material.lattice, material.fractional, material.numbers)[1].min()
    nearest = cKDTree(found.ideal).query(found.ideal, k=2)[0][:, 1]
    assert np.median(nearest) == pytest.approx(shortest)
    assert nearest.min() == pytest.approx(shortest)
    # No site is missing: atoms of one element, equivalent here, have as many neighbours each.
    inner = ((found.ideal > 6) & (found.ideal < [14, 14, 24])).all(axis=1)
    around = cKDTree(found.ideal).query_ball_point(found.ideal, 5.7, return_length=True)
    for element in np.unique(material.numbers):
        assert len(set(around[inner & (found.numbers == element)])) == 1


def test_columns_of_a_simple_crystal():
    found = cut(cubic(4.0, [[0, 0, 0]], [42]), (0, 0, 1), displacement=0.1)
    columns = specimen.columns(found)
    np.testing.assert_allclose(columns.mean_z, 42)
    assert set(columns.atoms) <= {7, 8}  # 30 Å of 4 Å periods
    assert columns.atoms.sum() == len(found.numbers)
    inner = ((columns.centres > 5) & (columns.centres < 15)).all(axis=1)
    np.testing.assert_allclose(columns.nearest[inner], 4.0, atol=0.3)


def test_columns_are_the_mean_of_the_displaced_atoms():
    found = cut(PEROVSKITE, (0, 0, 1), displacement=0.08)
    columns = specimen.columns(found)
    nearest = cKDTree(columns.centres).query(found.ideal[:, :2])[1]
    for column in np.flatnonzero(columns.mean_z > 37.5)[:5]:  # strontium alone
        atoms = found.positions[(nearest == column) & (found.numbers == 38)]
        assert len(atoms) == columns.atoms[column]
        np.testing.assert_allclose(columns.centres[column], atoms[:, :2].mean(axis=0))
    mixed = columns.mean_z[(columns.mean_z > 8) & (columns.mean_z < 37.5)]
    assert mixed.mean() == pytest.approx((22 + 8) / 2, abs=0.5)


def test_displacements_have_the_rms_asked_for():
    found = cut(PEROVSKITE, (1, 1, 0), displacement=0.07)
    rms = np.sqrt(((found.positions - found.ideal) ** 2).mean(axis=0))
    np.testing.assert_allclose(rms, 0.07, rtol=0.1)


def test_turn_and_offset_are_random():
    one, same, other = (cut(PEROVSKITE, (0, 0, 1), seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.ideal, same.ideal)
    assert cKDTree(one.ideal).query(other.ideal)[0].max() > 0.3


def test_formula_is_reduced():
    assert specimen.reduced_formula(np.array([8, 22, 8, 8, 38])) == "SrTiO3"
