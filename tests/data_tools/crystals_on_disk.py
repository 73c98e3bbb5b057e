"""A folder of small, real crystals for tests: every one its own family."""

from pathlib import Path

from pymatgen.core import Lattice, Structure


def write_cifs(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    crystals = {
        "NaCl": (225, Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5] * 3]),
        "CsCl": (221, Lattice.cubic(4.12), ["Cs", "Cl"], [[0, 0, 0], [0.5] * 3]),
        "Si": (227, Lattice.cubic(5.43), ["Si"], [[0, 0, 0]]),
        "W": (229, Lattice.cubic(3.16), ["W"], [[0, 0, 0]]),
        "Mg": (194, Lattice.hexagonal(3.21, 5.21), ["Mg"], [[1 / 3, 2 / 3, 0.25]]),
        "SrTiO3": (
            221,
            Lattice.cubic(3.905),
            ["Sr", "Ti", "O"],
            [[0, 0, 0], [0.5] * 3, [0.5, 0.5, 0]],
        ),
    }
    for name, (group, lattice, species, sites) in crystals.items():
        structure = Structure.from_spacegroup(group, lattice, species, sites)
        structure.to(str(folder / f"{name}.cif"))
