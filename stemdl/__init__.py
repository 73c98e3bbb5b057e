"""stemdl: from 4D-STEM diffraction patterns to atoms, on one core or 27,600 GPUs."""

__version__ = "0.1.0"
