"""What convolutions run over: two layouts of one FC-DenseNet.

`diffraction`, the paper's: over diffraction pixels; the probe positions are the channels.
`scan`: over probe positions; the detector pixels are the channels. A shift of the specimen is then
a shift of the input and of the output: each probe position of each sample teaches the same weights.

Where the potential is finer than the grid, transposed convolutions take the features up to it, one
for each prime factor of the ratio, each followed by a dense block. Their channels halve from step
to step, as pixels at least quadruple; a step's dense layers add half of its channels each.
"""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from stemdl import schema
from stemdl.errors import UserError
from stemdl.network.fc_densenet import Dropout, Parts, fc_densenet

_POLICIES = {"fp32": "float32", "fp16": "mixed_float16", "bf16": "mixed_bfloat16"}


def build(
    network: schema.Network,
    cbed_shape: Sequence[int],
    potential_shape: Sequence[int],
    *,
    compute: str = "fp32",
    seed: int,
) -> keras.Model:
    """The network for patterns of (Sy, Sx, Ky, Kx) and potentials of (H, W).

    Args:
        compute: dtype of activations, fp32, fp16 or bf16; weights are float32.
        seed: the same seed gives the same weights.

    Returns:
        A model (B, Sy, Sx, Ky, Kx) -> (B, H, W) float32, both normalised.

    Raises:
        UserError: the shapes do not fit each other or the number of poolings.
    """
    scan, detector = tuple(cbed_shape[:2]), tuple(cbed_shape[2:])
    over_scan = network.layout == "scan"
    grid, channels = (scan, detector) if over_scan else (detector, scan)
    axis = "probe positions" if over_scan else "detector pixels"
    _check_poolings(grid, len(network.layers), axis)
    ratio = _ratio(grid, potential_shape, axis)
    parts = Parts(network, keras.DTypePolicy(_POLICIES[compute]), seed)

    cbed = keras.Input(cbed_shape, name="cbed")
    order = (1, 2, 3, 4) if over_scan else (3, 4, 1, 2)
    x = keras.layers.Permute(order, dtype=parts.dtype, name="grid_first")(cbed)
    x = keras.layers.Reshape((*grid, math.prod(channels)), dtype=parts.dtype, name="flat_channels")(
        x
    )
    x = parts.convolution(x, network.initial_channels, network.initial_kernel, "initial")
    x = parts.relu(x, "initial_relu")
    x = fc_densenet(parts, x)
    for index, stride in enumerate(prime_factors(ratio)):
        width = max(network.fine_channels // 2**index, 2)
        x = parts.up(x, width, stride, f"finer_{index}")
        new = parts.dense_block(x, network.fine_layers, width // 2, f"fine_{index}")
        x = parts.join([x, *new], f"fine_{index}_join")
    x = parts.convolution(x, 1, 1, "final")
    # A float32 layer casts what it is given.
    potential = keras.layers.Reshape(potential_shape, dtype="float32", name="potential")(x)
    return keras.Model(cbed, potential, name=f"fc_densenet_{network.layout}")


def sketch(
    network: schema.Network,
    cbed_shape: Sequence[int],
    potential_shape: Sequence[int],
    *,
    compute: str = "fp32",
) -> keras.Model:
    """As `build`, without weights: its variables have shapes and paths but no values.

    It takes no memory to speak of, at any size; for counting and planning.
    """
    with keras.StatelessScope(initialize_variables=False):
        return build(network, cbed_shape, potential_shape, compute=compute, seed=0)


def set_dropout_seed(model: keras.Model, seed: int, step: tf.Tensor, rank: int) -> None:
    """Make the next training call's dropout masks a pure function of (seed, step, rank).

    Graph code, to be called in the training step before the model. Does nothing without dropout.
    """
    for layer in model.layers:
        if isinstance(layer, Dropout):
            place = tf.cast(step, tf.int64) * 2**24 + rank
            layer.seed.assign(tf.stack([tf.constant(seed, tf.int64), place]))


def prime_factors(number: int) -> list[int]:
    """In rising order; 12 -> [2, 2, 3], 1 -> []."""
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _check_poolings(grid: tuple[int, ...], poolings: int, axis: str) -> None:
    for size in grid:
        sizes = [size]
        for _ in range(poolings):
            sizes.append(math.ceil(sizes[-1] / 2))
        if poolings and sizes[-2] < 2:
            raise UserError(
                f"network.layers asks for {poolings} poolings of {size} {axis}: "
                f"{' -> '.join(map(str, sizes))}; wanted at least 2 before each: "
                f"use at most {math.ceil(math.log2(size))} entries"
            )


def _ratio(grid: tuple[int, ...], potential: Sequence[int], axis: str) -> int:
    """Potential pixels for each grid pixel."""
    ratios = [fine / coarse for fine, coarse in zip(potential, grid, strict=True)]
    if ratios[0] == ratios[1] and ratios[0].is_integer() and ratios[0] >= 1:
        return int(ratios[0])
    shown = ", ".join(
        f"{fine} / {coarse} = {ratio:.4g}"
        for fine, coarse, ratio in zip(potential, grid, ratios, strict=True)
    )
    raise UserError(
        f"the potential's pixels over the {axis} (y, x) are {shown}: wanted one integer for both; "
        "change the data's sampling or network.layout"
    )
