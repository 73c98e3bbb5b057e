"""Decoding: what NumPy and the normaliser give, for every type, symmetry and source."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl.data import decoding, symmetry
from stemdl.data.decoding import IN_MEMORY, NOT_FINITE, TOO_SHORT, UNREADABLE, Decoder, Fault
from stemdl.data.normalise import Normaliser

SQUARE, OBLONG = (3, 3, 5, 5), (2, 3, 5, 4)


def stored_numbers(dtype, shape, seed=0):
    """Of all sizes, with zeros, subnormal and (if they can be) negative numbers."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "u":
        return rng.integers(0, 65536, shape).astype(dtype)
    found = rng.normal(size=shape) * 10.0 ** rng.integers(-8, 5, shape)
    return np.where(rng.random(shape) < 0.1, 0, found).clip(-65504, 65504).astype(dtype)


def decoded(decode, arrays, turns=None, *, files=None, places=None):
    """The batch (B, ...) and what was wrong."""
    out = np.full((len(arrays), *decode.shape), 7, decode.dtype)
    files = np.full(len(arrays), IN_MEMORY) if files is None else files
    places = np.array([each.ctypes.data for each in arrays]) if places is None else places
    scratch = np.empty(decode.scratch, np.uint8)
    fault = decode(files, places, turns, out, scratch)
    return out, fault


@pytest.mark.parametrize("sqrt", [True, False])
@pytest.mark.parametrize("dtype", decoding.TYPES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_patterns_come_out_as_numpy_normalises_them(dtype, sqrt, data):
    shape = data.draw(st.sampled_from([SQUARE, OBLONG, (1, 1, 1, 1), (2, 2, 9, 33)]))
    detector = data.draw(st.sampled_from([(), shape[2:]]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    known = Normaliser(
        sqrt=sqrt,
        cbed_mean=rng.normal(size=detector).astype(np.float32),
        cbed_std=rng.uniform(0.5, 2, detector).astype(np.float32),
        potential_mean=3.0,
        potential_std=0.5,
    )
    arrays = [stored_numbers(dtype, shape, seed) for seed in range(3)]
    decode = decoding.decoders({"cbed": (shape, np.dtype(dtype))}, known)["cbed"]
    turns = rng.integers(symmetry.order(shape), size=3)
    found, fault = decoded(decode, arrays, turns)
    assert fault is None
    for out, array, turn in zip(found, arrays, turns, strict=True):
        wanted = known.cbed(np.ascontiguousarray(symmetry.apply(turn, array)))
        np.testing.assert_allclose(out, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def test_every_finite_half_is_converted_exactly():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = np.where(np.isfinite(halves), halves, 0).reshape(256, 256)
    found, fault = decoded(Decoder((256, 256), halves.dtype, "plain"), [halves])
    assert fault is None
    np.testing.assert_array_equal(found[0], halves.astype(np.float32))


@pytest.mark.parametrize("dtype", decoding.TYPES)
@pytest.mark.parametrize("shape", [SQUARE, OBLONG, (4, 4), (3, 5)])
def test_a_copy_is_turned_and_otherwise_as_stored(dtype, shape):
    array = stored_numbers(dtype, shape)
    decode = decoding.decoders({"cbed": (shape, array.dtype)}, None)["cbed"]
    for turn in range(symmetry.order(shape)):
        (found,), fault = decoded(decode, [array], np.array([turn]))
        assert fault is None
        assert found.tobytes() == symmetry.apply(turn, array).tobytes()


@pytest.mark.parametrize("operation", range(8))
def test_an_inverse_takes_an_operation_back(operation):
    array = stored_numbers("float32", SQUARE)
    turned = symmetry.apply(operation, array)
    np.testing.assert_array_equal(symmetry.apply(symmetry.inverse(operation), turned), array)


@pytest.mark.parametrize("block", [1, 1000, 1 << 20])
def test_files_are_read_in_blocks_of_any_size(tmp_path, monkeypatch, block):
    monkeypatch.setattr(decoding, "BLOCK", block)
    arrays = [stored_numbers("float16", SQUARE, seed) for seed in range(4)]
    path = tmp_path / "samples"
    path.write_bytes(b"head" + b"".join(each.tobytes() for each in arrays))
    decode = Decoder(SQUARE, np.dtype("float16"), "root", 0.5, 2.0)
    file = os.open(path, os.O_RDONLY)
    try:
        order = np.array([2, 0, 3])
        places = 4 + order * decode.size
        found, fault = decoded(decode, order, files=np.full(3, file), places=places)
    finally:
        os.close(file)
    assert fault is None
    wanted, _ = decoded(decode, [arrays[number] for number in order])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", decoding.WAYS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_sample_that_is_not_finite_is_told(dtype, way, bad):
    arrays = [stored_numbers(dtype, OBLONG, seed) for seed in range(3)]
    arrays[1][1, 2, 4, 3] = bad
    _, fault = decoded(Decoder(OBLONG, np.dtype(dtype), way), arrays)
    assert fault == Fault(1, NOT_FINITE, fault.detail)


def test_what_is_wrong_with_a_file_is_told(tmp_path):
    decode = Decoder(SQUARE, np.dtype("float32"), "plain")
    path = tmp_path / "samples"
    path.write_bytes(bytes(decode.size + 100))
    file = os.open(path, os.O_RDONLY)
    files, places = np.array([file, file]), np.array([0, decode.size])
    _, fault = decoded(decode, files, files=files, places=places)
    assert fault == Fault(1, TOO_SHORT, decode.size + 100)
    os.close(file)
    _, fault = decoded(decode, files, files=files, places=places)
    assert fault == Fault(0, UNREADABLE, 9)  # EBADF
