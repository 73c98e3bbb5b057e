"""Ranks fail together; Horovod averages every gradient exactly once."""

import json

import numpy as np
import pytest
from conftest import run_ranks

pytestmark = pytest.mark.mpi

FAILING = """
import sys
from stemdl import command, ranks
from stemdl.errors import UserError

def main():
    here = ranks.discover()
    with here.together("reading"):
        if here.rank == 1:
            raise {error}("the file is torn")
    print("went on")
    return 0

sys.exit(command.run(main))
"""


def test_one_ranks_mistake_is_everyones_and_told_once(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(FAILING.format(error="UserError"))
    done = run_ranks(3, [str(script)])
    assert done.returncode == 2
    assert done.stderr.count("stemdl: rank 1: the file is torn") == 1
    assert "went on" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_defect_on_one_rank_ends_all_with_its_traceback(tmp_path):
    script = tmp_path / "fail.py"
    script.write_text(FAILING.format(error="ZeroDivisionError"))
    done = run_ranks(3, [str(script)])
    assert done.returncode not in (0, 2)
    assert "ZeroDivisionError('the file is torn')" in done.stderr
    assert "went on" not in done.stdout


REDUCING = """
import json, sys
import numpy as np, tensorflow as tf
from stemdl import ranks
from stemdl.reduction import allreduce, levers
from stemdl.schema import Reduction

here = ranks.discover()
levers.start(Reduction(stall_warning=5, stall_shutdown=20), here)
shapes = [(3,), (2, 2), (), (5,), (1, 4)]
generators = [np.random.default_rng([here.rank, index]) for index in range(len(shapes))]
values = [g.normal(size=shape).astype("f4") for g, shape in zip(generators, shapes)]
plans = [[[4], [3], [2], [1], [0]], [[3, 4], [0, 1, 2]], [[4, 2, 0, 1, 3]]]
found = {}
for number, groups in enumerate(plans):
    for wire in ("fp32", "fp16"):
        name = f"{number}.{wire}"
        @tf.function(autograph=False)
        def reduce(tensors):
            return allreduce.average(tensors, groups, size=here.size, wire=wire, name=name)
        for _ in range(2):  # the second time from the response cache
            reduced = reduce([tf.constant(value) for value in values])
            found[name] = [tensor.numpy().tolist() for tensor in reduced]
everyone = here.collect((found, [v.tolist() for v in values]))
if here.rank == 0:
    print(json.dumps(everyone))
"""


def test_groups_average_every_gradient_on_all_ranks(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(REDUCING)
    done = run_ranks(3, [str(script)])
    assert done.returncode == 0, done.stderr
    everyone = json.loads(done.stdout.splitlines()[-1])
    tolerance = {"fp32": 1e-6, "fp16": 2e-3}
    for index in range(5):
        wanted = np.mean([values[index] for _, values in everyone], axis=0)
        for found, _ in everyone:
            for key, tensors in found.items():
                limit = tolerance[key.split(".")[1]]
                np.testing.assert_allclose(tensors[index], wanted, rtol=limit, atol=limit)
    assert all(found == everyone[0][0] for found, _ in everyone)


def test_the_self_check_runs_on_three_ranks():
    done = run_ranks(1, ["-m", "stemdl.launch.selfcheck", "3"])
    assert done.returncode == 0, done.stderr
    assert "3 ranks" in done.stdout
