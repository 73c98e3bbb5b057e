"""Fast electrons: wavelength, and what an angle is in reciprocal space."""

from math import sqrt

from scipy import constants

# h c and the rest energy m c² of an electron, in keV Å and keV (CODATA, by scipy).
_HC = constants.h * constants.c / constants.e * 1e7
_REST = constants.m_e * constants.c**2 / constants.e * 1e-3


def wavelength(energy: float) -> float:
    """Relativistic electron wavelength [Å] at an energy [keV].

    lambda = hc / sqrt(E (E + 2 mc²)), from E² = p²c² + m²c⁴ with the rest energy taken off.
    """
    return _HC / sqrt(energy * (energy + 2 * _REST))


def spatial_frequency(angle: float, energy: float) -> float:
    """Spatial frequency [1/Å] of a small scattering angle [mrad]."""
    return angle * 1e-3 / wavelength(energy)
