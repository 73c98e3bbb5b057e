"""The rooms of docs/architecture.md: each imports only from rooms above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the top down; the modules that lie directly in stemdl/ are the foundation.
ROOMS = (
    "stemdl",
    "stemdl.data",
    "data_tools",
    "stemdl.network",
    "stemdl.reduction",
    "stemdl.scaling",
    "stemdl.training",
    "stemdl.evaluation",
    "stemdl.launch",
    "stemdl.cli",
)
MODULES = sorted([*(ROOT / "stemdl").rglob("*.py"), *(ROOT / "data_tools").rglob("*.py")])


def room(module: str) -> str:
    if module in ("stemdl.cli", "stemdl.__main__"):
        return "stemdl.cli"
    parts = module.split(".")
    inner = ".".join(parts[:2])
    return inner if inner in ROOMS else parts[0]


def imports(path: Path) -> set[str]:
    """Modules of ours that the file imports, at its top or within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("stemdl", "data_tools")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_from_above(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    here = ROOMS.index(room(module))
    below = {name for name in imports(path) if ROOMS.index(room(name)) > here}
    assert not below, f"{module} ({room(module)}) imports from rooms below it: {sorted(below)}"


def test_training_needs_no_library_of_another_licence():
    """abTEM and rosettasciio are GPL: stemdl itself must not import them or data_tools."""
    foreign = {"abtem", "rsciio", "ase", "pymatgen", "data_tools"}
    for path in (ROOT / "stemdl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not foreign & {name.split(".")[0] for name in names}, path
