"""The electron's wavelength is the textbook's and abTEM's."""

import pytest

from stemdl import electrons


@pytest.mark.parametrize(("energy", "expected"), [(200, 0.0251), (100, 0.0370), (300, 0.0197)])
def test_wavelengths_are_the_textbook_ones(energy, expected):
    assert electrons.wavelength(energy) == pytest.approx(expected, abs=5e-5)


def test_wavelength_agrees_with_abtem():
    from abtem.core.energy import energy2wavelength

    for energy in (60, 80, 200, 300):
        assert electrons.wavelength(energy) == pytest.approx(
            energy2wavelength(energy * 1e3), rel=1e-6
        )
