"""Reads experiment files: one YAML from simulation to report, checked before anything runs.

    experiment = load("configs/demo.yaml", ["train.batch=4", "reduction.planner=layer"])

`stemdl.schema` holds the keys; `stemdl keys` prints them. An unknown key, a wrong type or a value
out of range is a UserError that names the file, the key, the value found and the value wanted.
"""

import difflib
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from stemdl.errors import UserError
from stemdl.schema import Experiment, Section

Kind = TypeVar("Kind", bound=Section)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Experiment:
    """Read an experiment file and apply `key=value` overrides (dotted keys, YAML values).

    Raises:
        UserError: missing file, bad YAML, unknown key or value out of range.
    """
    return build(read(path, overrides), str(path))


def read(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """The tree of plain values in a YAML file, with `key=value` overrides applied; not checked.

    Raises:
        UserError: missing file or bad YAML.
    """
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{path}: wanted sections such as 'train:', found {type(tree).__name__}")
    for override in overrides:
        _apply(tree, override)
    return tree


def build(tree: dict[str, Any], source: str) -> Experiment:
    """Check a tree of plain values. `source` is named in errors."""
    return check(Experiment, tree, source)


def check(kind: type[Kind], tree: dict[str, Any], source: str) -> Kind:
    """Check a tree of plain values against any section, such as a site file's.

    Raises:
        UserError: names `source` and, for each fault, the key, the value found and that wanted.
    """
    try:
        return kind.model_validate(_numbers(tree))
    except ValidationError as error:
        faults = (_explain(fault, kind) for fault in error.errors())
        raise UserError(f"{source}: {'; '.join(faults)}") from error


def dump(experiment: Experiment) -> str:
    """The resolved experiment as YAML; `load` reads it back to an equal experiment."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def keys(section: type[Section] = Experiment, prefix: str = "") -> dict[str, str]:
    """Every key by its dotted path, with its description."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= keys(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.description or ""
    return found


def describe(section: type[Section] = Experiment, prefix: str = "") -> str:
    """All keys as lines `key = default  meaning`, for people."""
    lines = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            lines += ["", f"# {(kind.__doc__ or name).splitlines()[0]}"]
            lines.append(describe(kind, f"{prefix}{name}."))
        else:
            lines.append(f"{prefix}{name} = {_plain(field.default)}")
            if field.description:
                lines[-1] = f"{lines[-1]:44} {field.description}"
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """A default as one would write it in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: wanted key=value, such as train.batch=4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML") from error
    *parents, leaf = key.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if below is None:
            below = tree[parent] = {}
        if not isinstance(below, dict):
            raise UserError(f"override {override!r}: {parent!r} is not a section")
        tree = below
    tree[leaf] = value


_EXPONENT = re.compile(r"^[+-]?\d+(\.\d*)?[eE][+-]?\d+$")


def _numbers(tree: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text; everyone means a number."""
    if isinstance(tree, dict):
        return {key: _numbers(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_numbers(value) for value in tree]
    if isinstance(tree, str) and _EXPONENT.match(tree):
        return float(tree)
    return tree


def _explain(error: Any, kind: type[Section]) -> str:
    """One of pydantic's errors as: key: found value, wanted what."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_suggest(where, kind)}"
    wanted = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if not where:
        return wanted
    unit = re.search(r"\[[^]]+\]", keys(kind).get(re.sub(r"\.\d+$", "", where), ""))
    return f"{where} is {error['input']!r}, wanted {wanted}{' ' + unit.group() if unit else ''}"


def _suggest(where: str, kind: type[Section]) -> str:
    known = set(keys(kind))
    known |= {key.rsplit(".", depth)[0] for key in known for depth in range(1, key.count(".") + 1)}
    leaf = where.rsplit(".", 1)[-1]
    same_name = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    near = difflib.get_close_matches(where, sorted(same_name or known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""
