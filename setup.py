"""The one part of the package that is compiled; all else about it stands in setup.cfg."""

from setuptools import Extension, setup

decode = Extension(
    "stemdl.data._decode",
    ["stemdl/data/decode.c"],
    # Vector loops; roots and comparisons need not tell errno or raise traps.
    extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"],
)
setup(ext_modules=[decode])
