"""Catalogue of crystals: what is used, what is left out, and the split by family."""

import numpy as np
import pytest
from crystals_on_disk import write_cifs
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import structures
from data_tools.structures import SPLITS, Material
from stemdl import schema
from stemdl.errors import UserError


@pytest.fixture(scope="module")
def library():
    return structures.collect(schema.Materials())


def material(prototype, formula, number):
    """A cell whose atom count and space group are its own, so only the labels make families."""
    atoms = np.arange(number + 1)[:, None] / (number + 1) * np.ones(3)
    numbers = np.full(number + 1, 26)
    return Material(f"m{number}", prototype, formula, 1, np.eye(3) * 3, atoms, numbers)


def test_the_library_gives_hundreds_of_prototypes(library):
    assert len(library.materials) > 250
    assert len({each.name for each in library.materials}) == len(library.materials)
    assert set(library.reasons()) == {"cell too large"}
    for each in library.materials:
        assert 1 <= len(each.numbers) <= schema.Materials().max_cell_atoms
        assert structures.contacts(each.lattice, each.fractional, each.numbers)[1].min() > 0.9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_library_split_shares_no_prototype_and_no_formula(library, seed):
    chosen = schema.Materials()
    splits = structures.split(library.materials, chosen, seed)
    for first, second in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for key in ("name", "prototype", "formula"):
            a, b = ({getattr(m, key) for m in splits[name]} for name in (first, second))
            assert not a & b
    total = len(library.materials)
    assert len({m.prototype for m in splits["test"]}) >= 30
    assert len(splits["test"]) == pytest.approx(chosen.test_fraction * total, abs=3)
    assert len(splits["dev"]) == pytest.approx(chosen.dev_fraction * total, abs=3)


def test_split_follows_the_seed(library):
    names = [
        [m.name for m in structures.split(library.materials, schema.Materials(), seed)["test"]]
        for seed in (0, 0, 1)
    ]
    assert names[0] == names[1] != names[2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=8, max_size=40))
def test_families_are_never_divided(labels):
    materials = [material(f"p{p}", f"f{f}", number) for number, (p, f) in enumerate(labels)]
    try:
        splits = structures.split(materials, schema.Materials(), seed=3)
    except UserError as error:
        assert "no family" in str(error)
        return
    assert sum(map(len, splits.values())) == len(materials)
    for key in ("prototype", "formula"):
        where = {}
        for name, chosen in splits.items():
            for each in chosen:
                assert where.setdefault(getattr(each, key), name) == name


def test_same_cell_under_two_labels_is_one_family():
    twins = [material("p0", "f0", 4), material("p1", "f1", 4)]
    assert len(set(structures._families(twins))) == 1


def test_formulas_are_dealt_by_hash_in_the_fractions():
    chosen = schema.Materials(dev_fraction=0.2, test_fraction=0.3)
    dealt = [structures.split_of_formula(f"X{n}", {}, chosen, seed=5) for n in range(2000)]
    shares = [dealt.count(name) / 2000 for name in SPLITS]
    np.testing.assert_allclose(shares, [0.5, 0.2, 0.3], atol=0.04)
    assert structures.split_of_formula("X1", {"X1": "dev"}, chosen, seed=5) == "dev"


def test_bad_cifs_are_skipped_with_a_reason(tmp_path):
    write_cifs(tmp_path)
    write_cifs(tmp_path / "below")
    (tmp_path / "empty.cif").write_text("")
    (tmp_path / "garbage.cif").write_bytes(b"\x00\xff not a cif \x80")
    good = (tmp_path / "NaCl.cif").read_text()
    (tmp_path / "cut-off.cif").write_text(good[: len(good) // 2])
    lines = good.splitlines()
    occupied = [line[:-1] + "0.5" if line.split()[:1] == ["Na"] else line for line in lines]
    (tmp_path / "partial.cif").write_text("\n".join(occupied))
    found = structures.collect(
        schema.Materials(prototypes=False, cif_dir=tmp_path, max_cell_atoms=8)
    )
    assert {"NaCl", "Si", "below/NaCl"} <= {each.name for each in found.materials}
    assert found.reasons()["not a readable CIF"] >= 3
    assert found.reasons()["partial occupancy"] == 1
    assert set(found.skipped) == {"empty", "garbage", "cut-off", "partial"}


def test_unusable_crystals_are_named():
    from pymatgen.core import Lattice, Structure

    def reason(structure, atoms=64):
        with pytest.raises(structures.Unusable) as raised:
            structures.standardise("x", None, structure, atoms)
        return str(raised.value)

    cube = Lattice.cubic(3)
    assert "too large" in reason(Structure(cube, ["Fe", "O"], [[0, 0, 0], [0.5] * 3]), atoms=1)
    assert "hydrogen" in reason(Structure(cube, ["H"], [[0, 0, 0]]))
    assert "too close" in reason(Structure(cube, ["Fe", "O"], [[0, 0, 0], [0.1, 0, 0]]))
    assert "too heavy" in reason(Structure(cube, ["Rf"], [[0, 0, 0]]))


def test_nothing_usable_is_the_users_to_mend(tmp_path):
    with pytest.raises(UserError, match="no usable structure"):
        structures.collect(schema.Materials(prototypes=False, cif_dir=tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        structures.collect(schema.Materials(prototypes=False, cif_dir=tmp_path / "absent"))
    with pytest.raises(UserError, match="no family"):
        structures.split([material("p", "f", 3)], schema.Materials(), seed=0)
