"""The records of a shard: what each sample is, and where its atomic columns are."""

import h5py
import numpy as np


def _text(length: int) -> np.dtype:
    return h5py.string_dtype("utf-8", length)


SAMPLE = np.dtype(
    [
        ("material", _text(96)),  # identifies the crystal, such as a prototype and its elements
        ("prototype", _text(96)),
        ("formula", _text(64)),
        ("space_group", _text(16)),
        ("zone_axis", "i4", (3,)),
        ("energy", "f8"),  # [keV]
        ("semi_angle", "f8"),  # [mrad]
        ("defocus", "f8"),  # [Å], positive is underfocus
        ("cs", "f8"),  # [Å]
        ("thickness", "f8"),  # [Å]
        ("dose", "f8"),  # [e/Å²], NaN when noiseless
        ("mean_z", "f8"),  # mean atomic number
        ("elements", "i4"),  # number of different elements
        ("seed", "i8"),
        ("index", "i8"),  # of the sample in the whole data set
        ("scan_start", "i4", (2,)),  # (y, x) of its first probe in the scan that it was cut from
    ]
)
"""A row of the dataset `sample`: what was simulated or measured. Text is UTF-8 bytes."""

COLUMN = np.dtype(
    [
        ("sample", "i4"),  # row in this shard
        ("y", "f4"),  # [Å] from the centre of the first potential pixel
        ("x", "f4"),  # [Å]
        ("mean_z", "f4"),  # mean atomic number
        ("atoms", "i4"),  # number of atoms in the column
        ("nearest", "f4"),  # [Å] to the nearest other column
    ]
)
"""A row of the dataset `columns`: one atomic column in projection."""
