"""A few steps and reductions before a run, to see when gradients are ready and what they cost."""

from stemdl.network import layouts
from stemdl.ranks import Ranks
from stemdl.reduction import expected, levers, plan
from stemdl.reduction.plan import Outlook
from stemdl.schema import Experiment
from stemdl.training import devices


def rehearse(experiment: Experiment, ranks: Ranks) -> Outlook:
    """Measure the experiment's step on all ranks together; needs no data, leaves nothing.

    Raises:
        UserError: on all ranks alike, for whatever the user can mend.
    """
    with ranks.together("starting Horovod"):
        devices.set_up(experiment.train, experiment.seed, ranks)
        levers.start(experiment.reduction, ranks)
    with ranks.together("building the network"):
        shapes = expected.shapes(experiment)
        compute = experiment.train.precision.compute
        model = layouts.build(experiment.network, *shapes, compute=compute, seed=experiment.seed)
    return plan.measure(model, shapes, experiment, ranks, gamma=True)
