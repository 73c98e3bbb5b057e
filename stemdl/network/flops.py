"""Floating-point operations of a network, from its layers' shapes alone.

Counted as the paper counts: convolutions only, 2 for each multiply-add, training = 3 x forward (the
backward pass convolves twice, for the input's gradient and for the kernel's).
"""

import math

import keras


def count(model: keras.Model) -> int:
    """FLOPs of one sample's forward pass. `model` may be a sketch without weights."""
    return 2 * sum(_multiply_adds(layer) for layer in model.layers)


def _multiply_adds(layer: keras.Layer) -> int:
    if isinstance(layer, keras.layers.Conv2DTranspose):
        pixels = math.prod(layer.input.shape[1:3])  # each input pixel is spread by the kernel
    elif isinstance(layer, keras.layers.Conv2D):
        pixels = math.prod(layer.output.shape[1:3])
    else:
        return 0
    return pixels * math.prod(layer.kernel.shape)
