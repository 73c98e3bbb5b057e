"""The parts of a fully convolutional DenseNet, as functions on symbolic Keras tensors.

Tensors are (B, rows, columns, channels). A dense layer is ReLU -> convolution -> dropout and sees
the block's input and all features made before it. Source: Jégou et al., The One Hundred Layers
Tiramisu (2017), arXiv:1611.09326; average instead of maximum pooling, and batch normalisation in
transitions down alone, are Laanait et al.'s (2019), arXiv:1909.11150.

Every layer has a unique name that tells its place (`dense_0_layer_1`); its variables have the paths
`name/kernel` and `name/bias`, so that gradients can be grouped by layer.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from stemdl import schema

BATCH_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class Parts:
    """Makes layers of one network: its settings, the compute dtype, the seed of its weights."""

    settings: schema.Network
    dtype: keras.DTypePolicy
    seed: int

    def convolution(
        self, x: keras.KerasTensor, channels: int, kernel: int, name: str
    ) -> keras.KerasTensor:
        """Stride 1, the size kept."""
        layer = keras.layers.Conv2D(
            channels,
            kernel,
            padding="same",
            kernel_initializer=self._he(kernel**2 * x.shape[-1], name),
            dtype=self.dtype,
            name=name,
        )
        return layer(x)

    def dense_block(
        self, x: keras.KerasTensor, layers: int, growth: int, name: str
    ) -> list[keras.KerasTensor]:
        """The `growth` new features of each dense layer; without those of `x`."""
        # ReLU acts on each value alone: activate features once, not at each layer that sees them.
        active, new = [self.relu(x, f"{name}_relu")], []
        for index in range(layers):
            here = f"{name}_layer_{index}"
            seen = self.join(active, f"{here}_join")
            feature = self.convolution(seen, growth, self.settings.kernel, here)
            if self.settings.dropout:
                feature = Dropout(self.settings.dropout, dtype=self.dtype, name=f"{here}_dropout")(
                    feature
                )
            new.append(feature)
            active.append(self.relu(feature, f"{here}_relu"))
        return new

    def down(self, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        """Transition down: [batch normalisation,] ReLU, 1x1 convolution, 2x2 average pooling.

        A size that is odd rounds up: the last window averages what there is.
        """
        if self.settings.batch_norm:
            x = keras.layers.BatchNormalization(
                epsilon=BATCH_NORM_EPSILON, dtype=self.dtype, name=f"{name}_norm"
            )(x)
        x = self.relu(x, f"{name}_relu")
        x = self.convolution(x, x.shape[-1], 1, f"{name}_conv")
        return keras.layers.AveragePooling2D(
            2, padding="same", dtype=self.dtype, name=f"{name}_pool"
        )(x)

    def up(self, x: keras.KerasTensor, channels: int, stride: int, name: str) -> keras.KerasTensor:
        """Transition up: transposed convolution, `stride` times as many rows and columns."""
        kernel = self.settings.up_kernel or stride
        layer = keras.layers.Conv2DTranspose(
            channels,
            kernel,
            strides=stride,
            padding="same",
            # A pixel of the result sees (kernel / stride)^2 pixels of the input.
            kernel_initializer=self._he(max(kernel / stride, 1) ** 2 * x.shape[-1], name),
            dtype=self.dtype,
            name=name,
        )
        return layer(x)

    def crop(self, x: keras.KerasTensor, size: tuple[int, int], name: str) -> keras.KerasTensor:
        """Leave out the last rows and columns beyond `size`."""
        extra = [have - want for have, want in zip(x.shape[1:3], size, strict=True)]
        if not any(extra):
            return x
        cropping = tuple((0, each) for each in extra)
        return keras.layers.Cropping2D(cropping, dtype=self.dtype, name=name)(x)

    def join(self, tensors: Sequence[keras.KerasTensor], name: str) -> keras.KerasTensor:
        """All channels side by side."""
        if len(tensors) == 1:
            return tensors[0]
        return keras.layers.Concatenate(dtype=self.dtype, name=name)(list(tensors))

    def relu(self, x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        return keras.layers.ReLU(dtype=self.dtype, name=name)(x)

    def _he(self, fan_in: float, name: str) -> keras.initializers.Initializer:
        """He et al. (2015), arXiv:1502.01852. A layer's weights follow from seed and name alone."""
        seed = zlib.crc32(f"{self.seed}/{name}".encode()) >> 1
        return keras.initializers.RandomNormal(stddev=math.sqrt(2 / fan_in), seed=seed)


def fc_densenet(parts: Parts, x: keras.KerasTensor) -> keras.KerasTensor:
    """Dense blocks down to the coarsest grid and up again; all features at the size of `x`.

    On the way up a transposed convolution takes only the new features of the block below, as many
    channels as they are, and meets the skip connection; its size is cropped to the skip's.
    """
    growth, depths = parts.settings.growth, list(enumerate(parts.settings.layers))
    skips = []
    for depth, layers in depths:
        new = parts.dense_block(x, layers, growth, f"dense_{depth}")
        x = parts.join([x, *new], f"dense_{depth}_join")
        skips.append(x)
        x = parts.down(x, f"down_{depth}")
    new = parts.dense_block(x, parts.settings.bottleneck_layers, growth, f"dense_{len(depths)}")
    for index, (depth, layers) in enumerate(reversed(depths)):
        skip, number = skips[depth], len(depths) + 1 + index
        x = parts.join(new, f"dense_{number - 1}_new")
        x = parts.up(x, x.shape[-1], 2, f"up_{index}")
        x = parts.crop(x, skip.shape[1:3], f"up_{index}_crop")
        x = parts.join([x, skip], f"up_{index}_join")
        new = parts.dense_block(x, layers, growth, f"dense_{number}")
    return parts.join([x, *new], f"dense_{2 * len(depths)}_join")


@keras.saving.register_keras_serializable("stemdl")
class Dropout(keras.layers.Layer):
    """Dropout whose mask is a pure function of the variable `seed` and of the layer's name.

    It draws no numbers of its own: the training step assigns `seed`, (2,) int64, before each use.
    """

    def __init__(self, rate: float, **options: Any) -> None:
        super().__init__(**options)
        self.rate = rate
        with tf.device("CPU:0"):  # where random operations want their seed, on a GPU as well
            self.seed = self.add_weight(
                shape=(2,), dtype="int64", initializer="zeros", trainable=False, name="seed"
            )

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training:
            return x
        seed = self.seed.value + tf.constant([zlib.crc32(self.name.encode()), 0], tf.int64)
        return tf.nn.experimental.stateless_dropout(x, self.rate, seed=seed)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"rate": self.rate}
