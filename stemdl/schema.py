"""The sections of the experiment file: every key with its default, range, unit and meaning.

Lengths are in Å, energies in keV, angles in mrad, times in s. `stemdl.config` reads the files.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


class Section(BaseModel):
    """A part of the experiment file. Frozen: what was checked is what runs."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def _as_range(value: Any) -> Any:
    """A single number stands for a range of no width."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (value, value) if is_number else value


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"the range must rise, found {list(value)}")
    return value


Range = Annotated[tuple[float, float], BeforeValidator(_as_range), AfterValidator(_ordered)]
PositiveRange = Annotated[
    tuple[PositiveFloat, PositiveFloat], BeforeValidator(_as_range), AfterValidator(_ordered)
]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Counts(Section):
    """Samples in each split."""

    train: PositiveInt = Field(900, description="samples to train on")
    dev: PositiveInt = Field(48, description="samples to validate on during training")
    test: PositiveInt = Field(120, description="samples of materials that training never sees")


class Materials(Section):
    """Where crystals come from."""

    prototypes: bool = Field(True, description="use pymatgen's AFLOW prototypes")
    cif_dir: Path | None = Field(None, description="folder of CIF files to use as well")
    max_cell_atoms: PositiveInt = Field(64, description="leave out larger unit cells [atoms]")
    substitute: Annotated[float, Field(ge=0, le=1)] = Field(
        0.7, description="chance that a sample's elements are replaced by random others"
    )
    dev_fraction: Fraction = Field(0.08, description="part of the material families held for dev")
    test_fraction: Fraction = Field(0.16, description="part of the material families held for test")


class Simulate(Section):
    """Multislice simulation of 4D-STEM data (stemdl-data simulate)."""

    samples: Counts = Counts()
    materials: Materials = Materials()
    seed: NonNegativeInt = Field(0, description="a sample depends on this seed and its index alone")
    energy: PositiveRange = Field((100, 100), description="beam energy [keV], drawn from a range")
    semi_angle: PositiveRange = Field((20, 20), description="convergence semi-angle [mrad]")
    defocus: Range = Field((60, 60), description="defocus [Å], positive is underfocus")
    cs: Range = Field((0, 0), description="third-order spherical aberration Cs [Å]")
    thickness: PositiveRange = Field((40, 40), description="specimen thickness [Å]")
    displacement: NonNegativeFloat = Field(0.07, description="rms thermal displacement an axis [Å]")
    max_zone_index: PositiveInt = Field(2, description="largest Miller index of the zone axis")
    box: PositiveFloat = Field(24, description="width of the simulated supercell [Å]")
    grid: PositiveFloat = Field(0.2, description="real-space sampling of the multislice [Å]")
    slice_thickness: PositiveFloat = Field(2, description="slice thickness [Å]")
    scan: tuple[PositiveInt, PositiveInt] = Field((12, 12), description="probe positions (y, x)")
    scan_step: PositiveFloat = Field(1.0, description="distance of probe positions [Å]")
    detector: tuple[PositiveInt, PositiveInt] = Field(
        (31, 31), description="detector pixels (ky, kx) kept around the optic axis, after binning"
    )
    detector_bin: PositiveInt = Field(
        2,
        description="multislice pixels, each 1/box Å⁻¹ wide, summed to a detector pixel an axis",
    )
    dose: PositiveRange | None = Field(
        None, description="electrons per Å² (Poisson noise), drawn on a log scale; null: noiseless"
    )
    potential_pixel: PositiveFloat = Field(0.25, description="sampling of the stored potential [Å]")
    potential_blur: NonNegativeFloat = Field(
        0.3, description="Gaussian sigma applied to the stored projected potential [Å]"
    )
    shard_samples: PositiveInt = Field(60, description="samples in a shard file")
    dtype: Literal["float16", "float32", "uint16"] = Field(
        "float16", description="storage of cbed; uint16 holds counts and needs a dose"
    )
    compression: Literal["none", "gzip"] = Field(
        "none", description="gzip: smaller, no byte ranges"
    )
    workers: PositiveInt | None = Field(
        None, description="processes to simulate with when started without MPI; null: all cores"
    )
    stall_limit: PositiveFloat | None = Field(
        None,
        description="a rank that is done stops the job when the others finish no shard for this "
        "long: one is lost [s]; null: 300 s and three times what a shard should take",
    )


class Records(Section):
    """What the published network's LMDB environments do not say of themselves."""

    scan: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="probe positions (y, x); null: a square"
    )
    scan_step: PositiveFloat | None = Field(None, description="distance of probe positions [Å]")
    detector_step: PositiveFloat | None = Field(None, description="width of detector pixels [1/Å]")
    potential_blur: NonNegativeFloat = Field(0, description="sigma of the potential's blur [Å]")


class Data(Section):
    """The data set and how samples become tensors."""

    dir: Path = Field(
        Path("data"),
        description="data directory with train/ dev/ test/ of shards, or the LMDB environments "
        "batch_train_0.db and so on of the published network",
    )
    records: Records = Records()
    sqrt: bool = Field(True, description="take the square root of the patterns first")
    normalise: Literal["pixel", "global"] = Field(
        "pixel", description="mean and deviation for each detector pixel, or one for all"
    )
    noise: Fraction = Field(
        0.0, description="noise augmentation x <- (1-a) x + a u; a is uniform in [0, noise]"
    )
    symmetry: bool = Field(
        True, description="flips and quarter turns, of scan, patterns and potential alike"
    )
    readers: PositiveInt = Field(2, description="threads that read and prepare samples, a rank")
    prefetch: PositiveInt = Field(2, description="batches held ready, a rank")


class Stage(Section):
    """Copy of the data set to node-local storage (stemdl stage)."""

    dir: Path | None = Field(
        None, description="node-local directory, such as /mnt/bb/$USER; null: no"
    )
    streams: PositiveInt = Field(2, description="files copied at the same time on a node")
    block: PositiveInt = Field(8, description="size of one read or write [MiB]")
    keep_free: NonNegativeFloat = Field(1.0, description="space to leave free on the disk [GB]")
    broadcast: bool = Field(
        False,
        description="dev and test, which every node holds: one rank reads them and sends them to "
        "the nodes over MPI; good where the network is faster than the file system",
    )
    purge: bool = Field(
        False, description="remove the copies when training is done, unless another job uses them"
    )


class Network(Section):
    """FC-DenseNet. `layers` counts dense layers on the way down; the way up mirrors it."""

    layout: Literal["scan", "diffraction"] = Field(
        "scan",
        description="what convolutions run over: probe positions (detector pixels are channels), "
        "or diffraction pixels (probe positions are channels; the paper's)",
    )
    initial_channels: PositiveInt = Field(192, description="channels after the first convolution")
    growth: PositiveInt = Field(64, description="channels that each dense layer adds")
    layers: tuple[PositiveInt, ...] = Field((), description="dense layers before each pooling")
    bottleneck_layers: PositiveInt = Field(4, description="dense layers at the coarsest level")
    kernel: PositiveInt = Field(3, description="width of the dense layers' kernels [pixels]")
    initial_kernel: PositiveInt = Field(1, description="width of the first convolution [pixels]")
    fine_channels: PositiveInt = Field(
        64, description="channels after the first step up to the potential's sampling; then halved"
    )
    fine_layers: NonNegativeInt = Field(1, description="dense layers after each such step")
    up_kernel: PositiveInt | None = Field(
        None,
        description="width of transposed convolutions [pixels]; null: their stride, so that each "
        "pixel is written once; the paper's code has 1",
    )
    dropout: Fraction = Field(0.0, description="dropout after each dense layer in training")
    batch_norm: bool = Field(False, description="batch normalisation in transitions down")


# The grammar of `reduction.planner`; `stemdl.reduction.grouping` has the planners.
PLANNER = re.compile(
    r"none|layer|optimal|equal:(?P<count>[1-9]\d*)"
    r"|bytes:(?P<size>\d+(\.\d+)?)(?P<unit>B|[kMG]B|[KMG]iB)"
)


def _planner(value: str) -> str:
    if not PLANNER.fullmatch(value):
        raise ValueError(
            "none, layer, optimal, equal:N such as equal:4, or bytes:SIZE such as bytes:25MB"
        )
    return value


Planner = Annotated[str, AfterValidator(_planner)]


class Reduction(Section):
    """How gradients travel between ranks."""

    planner: Planner = Field(
        "layer",
        description="which gradients travel together: none (Horovod's own fusion), layer (one "
        "group for each layer scope, the paper's), equal:N (N groups), bytes:SIZE (such as "
        "bytes:25MB), optimal (ends the communication soonest)",
    )
    wire: Literal["fp32", "fp16"] = Field("fp32", description="dtype on the network")
    cache_capacity: NonNegativeInt = Field(1024, description="response cache (bitvector) [tensors]")
    cycle_time: PositiveFloat = Field(1.0, description="Horovod's negotiation cycle [ms]")
    fusion_threshold: NonNegativeFloat = Field(128, description="fusion buffer [MiB]")
    hierarchical: bool = Field(False, description="reduce within nodes first (NCCL and MPI)")
    group_fusion: bool = Field(True, description="let Horovod fuse groups that are ready together")
    timeline: Path | None = Field(None, description="write Horovod's timeline to this file")
    stall_warning: PositiveInt = Field(30, description="warn when a rank is missing for this [s]")
    stall_shutdown: PositiveInt = Field(
        300, description="stop all ranks when one is missing for this [s]"
    )


class Loss(Section):
    """What is minimised."""

    name: Literal["l1", "mse", "huber"] = Field("l1", description="on the normalised potential")
    huber_delta: PositiveFloat = Field(1.0, description="where Huber turns linear [deviations]")


class Optimizer(Section):
    """How gradients become updates."""

    name: Literal["adam", "sgd"] = Field("adam", description="sgd has Nesterov's momentum")
    lr: PositiveFloat = Field(1e-3, description="peak learning rate for one rank")
    scale_with_ranks: bool = Field(False, description="multiply the peak rate by the ranks")
    beta_1: Fraction = Field(0.9, description="Adam's first moment")
    beta_2: Fraction = Field(0.999, description="Adam's second moment")
    epsilon: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    momentum: Fraction = Field(0.9, description="SGD's Nesterov momentum")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled, on kernels only")
    larc: Literal["off", "scale", "clip"] = Field("off", description="layer-wise rate control")
    larc_eta: PositiveFloat = Field(1e-3, description="LARC's trust coefficient")
    larc_min_update: PositiveFloat = Field(1e-4, description="LARC's least scale factor")


class Schedule(Section):
    """The learning rate over the run."""

    name: Literal["constant", "cosine", "exponential"] = Field(
        "cosine", description="shape of the learning rate after the warm-up"
    )
    warmup: NonNegativeFloat = Field(1.0, description="linear warm-up [epochs]")
    decay: PositiveFloat = Field(0.99, le=1, description="exponential: factor a decay period")
    decay_epochs: PositiveFloat = Field(2.0, description="exponential: decay period [epochs]")
    staircase: bool = Field(True, description="exponential: by whole periods; false: smoothly")
    floor: Fraction = Field(0.01, description="cosine: final rate as a part of the peak")


class Precision(Section):
    """Compute dtype and loss scaling."""

    compute: Literal["fp32", "fp16", "bf16"] = Field("fp32", description="weights stay fp32")
    scaler: Literal["none", "backoff", "logmax"] = Field("none", description="loss scaler")
    growth_steps: PositiveInt = Field(2000, description="backoff: clean steps before doubling")
    floor: PositiveFloat = Field(1.0, description="backoff: least scale")


class Train(Section):
    """The training run."""

    batch: PositiveInt = Field(8, description="samples a rank and step")
    accumulate: PositiveInt = Field(1, description="micro-batches of a step; one reduction for all")
    epochs: PositiveInt = Field(20, description="passes over the training split")
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    clip_norm: PositiveFloat | None = Field(None, description="largest global gradient norm")
    ema: Fraction | None = Field(None, description="decay of averaged weights, used for evaluation")
    validate_every: PositiveFloat = Field(1.0, description="validation interval [epochs]")
    checkpoint_every: PositiveFloat = Field(300, description="checkpoint interval [s]")
    wall_limit: PositiveFloat | None = Field(
        None, description="checkpoint and leave after this time, start-up included [s]"
    )
    log_every: PositiveInt = Field(20, description="steps between lines of metrics.jsonl")
    images: NonNegativeInt = Field(4, description="reconstructions sent to TensorBoard")
    profile_steps: NonNegativeInt = Field(
        0, description="steps of which Horovod's timeline is written and reported, near the start"
    )
    threads: PositiveInt | None = Field(None, description="cores a rank; null: shared evenly")
    deterministic: bool = Field(True, description="the same bits for the same seed and ranks")
    stall_limit: PositiveFloat = Field(
        600, description="stop this rank when no step ends for this long: another rank is gone [s]"
    )


class Evaluate(Section):
    """Scores on a split that training never saw."""

    split: Literal["test", "dev", "train"] = Field("test", description="which split")
    batch: PositiveInt = Field(16, description="samples a step")
    checkpoint: Literal["best", "last"] = Field("best", description="which weights")
    match_radius: PositiveFloat = Field(0.5, description="farthest match of two columns [Å]")
    min_distance: PositiveFloat = Field(0.6, description="least distance of two found columns [Å]")
    threshold: Fraction = Field(0.08, description="least height of a column over the field's range")
    isolated: PositiveFloat = Field(
        1.0, description="columns nearer than this to another are left out of the atom score [Å]"
    )
    examples: PositiveInt = Field(3, description="worst, median and best reconstructions to show")
    baselines: bool = Field(True, description="score iCOM and virtual annular dark field as well")


class Scale(Section):
    """Step time and efficiency on a modelled machine (stemdl scale)."""

    machine: Path = Field(Path("configs/machines/summit.yaml"), description="machine file")
    ranks: tuple[PositiveInt, ...] = Field(
        (1, 6, 24, 96, 384, 1536, 6000, 13800, 27600), description="numbers of ranks to simulate"
    )
    steps: PositiveInt = Field(8, description="simulated steps a point, each with other noise")


class Experiment(Section):
    """The whole experiment file."""

    name: str = Field("experiment", pattern=r"^[\w.+-]+$", description="appears in reports")
    run: Path = Field(Path("runs/experiment"), description="where the run's files go")
    seed: NonNegativeInt = Field(0, description="weights, shuffling and augmentation")
    simulate: Simulate = Simulate()
    data: Data = Data()
    stage: Stage = Stage()
    network: Network = Network()
    reduction: Reduction = Reduction()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    scale: Scale = Scale()

    @model_validator(mode="after")
    def _consistent(self) -> "Experiment":
        if self.simulate.dtype == "uint16" and self.simulate.dose is None:
            raise ValueError("simulate.dtype is uint16 (counts), which needs simulate.dose")
        if self.train.profile_steps and self.reduction.timeline is not None:
            raise ValueError(
                "train.profile_steps writes a timeline itself: unset reduction.timeline"
            )
        if self.train.precision.scaler == "none" and self.train.precision.compute == "fp16":
            raise ValueError(
                "train.precision.compute is fp16, which needs train.precision.scaler: "
                "backoff or logmax"
            )
        if self.train.batch % self.train.accumulate:
            raise ValueError(
                f"train.accumulate is {self.train.accumulate}, wanted a divisor of train.batch, "
                f"{self.train.batch}"
            )
        return self
