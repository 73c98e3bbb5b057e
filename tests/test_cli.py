"""Help teaches, and every command that the documents show is one that parses."""

import re
import shlex
from pathlib import Path

import pytest

from data_tools import cli as data_cli
from stemdl import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "configs").glob("*.yaml"))
COMMAND = re.compile(r"^\s*(?:#\s+|\$ )?(?:(?:mpirun|srun|jsrun) [^#]*?)?(stemdl(?:-data)? .*)$")


def commands() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        fenced = path.suffix == ".yaml"
        for line in path.read_text().splitlines():
            if line.startswith("```"):
                fenced = not fenced
            elif fenced and (match := COMMAND.match(line)):
                command = match[1].split(" # ")[0].split("  #")[0].rstrip("\\ ")
                found.append((path.name, re.sub(r"\s{2,}.*", "", command)))
    return found


@pytest.mark.parametrize(("document", "text"), commands(), ids=lambda value: value)
def test_documented_commands_parse(document, text):
    program, *arguments = shlex.split(text)
    parser = (cli if program == "stemdl" else data_cli).parser()
    parser.parse_args(arguments)


@pytest.mark.parametrize("parser", [cli.parser(), data_cli.parser()], ids=["stemdl", "data"])
def test_help_shows_examples(parser):
    assert "configs/demo.yaml" in parser.format_help()


def test_a_wrong_verb_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["trian"])
    assert ended.value.code == 2
    assert "invalid choice" in capsys.readouterr().err
