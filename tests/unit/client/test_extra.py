"""What a trainer adds to a checkpoint comes back as it was, and never runs code."""

from __future__ import annotations

import collections
import enum
import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardam._extra import decode_extra, encode_extra
from shardam._tensor_file import MAX_HEADER_BYTES, RawTensor, write_tensors
from shardam.errors import BadOption, CheckpointDamaged, VersionMismatch

NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("efbeadde0000f8ff"))[0]

KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()

PLAIN = KEYS | st.floats()

TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)

TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.uint32,
    torch.int32,
    torch.float32,
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
]


def there_and_back(extra: object) -> object:
    return decode_extra(encode_extra(extra), "extra-rank-0.safetensors")


def require_same(found: object, expected: object) -> None:
    """Holds two trees of values equal, types and bits included."""
    assert type(found) is type(expected)
    match expected:
        case dict():
            assert isinstance(found, dict)
            for (key, value), (other_key, other) in zip(expected.items(), found.items(), strict=True):
                require_same(other_key, key)
                require_same(other, value)
        case list() | tuple():
            assert isinstance(found, (list, tuple))
            for value, other in zip(expected, found, strict=True):
                require_same(other, value)
        case float():
            assert struct.pack("<d", found) == struct.pack("<d", expected)
        case torch.Tensor():
            assert isinstance(found, torch.Tensor)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            bits = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
            assert torch.equal(*bits)
        case np.ndarray() | np.generic():
            assert isinstance(found, (np.ndarray, np.generic))
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        case _:
            assert found == expected


@given(TREES)
def test_trees_of_plain_values_come_back_with_their_types_and_bits(extra: object) -> None:
    require_same(there_and_back(extra), extra)


def test_odd_floats_and_large_integers_come_back() -> None:
    extra = [float("nan"), NAN_WITH_PAYLOAD, float("inf"), -float("inf"), -0.0, 5e-324, 2**53, -(2**63) - 1, 10**5000]
    require_same(there_and_back(extra), extra)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_all_dtypes_and_shapes_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    item = torch.empty(0, dtype=dtype).element_size()
    bits = torch.arange(12 * item, dtype=torch.uint8)
    full = (bits % 2).view(torch.bool) if dtype is torch.bool else bits.view(dtype)
    tensors = [full, full.reshape(3, 4).T, full[:1].reshape(()), full[:0].reshape(0, 3), full[::2]]
    require_same(there_and_back(tensors), [tensor.contiguous() for tensor in tensors])


def test_arrays_and_scalars_of_numpy_come_back_private_and_writable() -> None:
    rng = np.random.default_rng(1)
    extra = {
        "f": rng.normal(size=(2, 3)),
        "columns": np.asfortranarray(rng.normal(size=(2, 3)).astype(np.float32)),
        "big": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 4), np.float16),
        "zero_dim": np.array(3, np.uint8),
        "text": np.array(["a", "äöü"]),
        "bytes": np.array([b"ab", b"c"]),
        "time": np.array(["2020-01-01"], "M8[s]"),
        "c": np.array([1 + 2j]),
        "flags": np.array([True, False]),
        "scalars": [np.float32(0.1), np.int64(7), np.bool_(True), np.float64("nan"), np.str_("x")],
    }
    found = there_and_back(extra)
    require_same(found, extra)
    assert isinstance(found, dict)
    found["f"][0, 0] = 9.0
    assert extra["f"][0, 0] != 9.0  # type: ignore[index]


def test_optimizer_and_model_states_of_torch_come_back_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).to(torch.float32)
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.SparseAdam([torch.nn.Parameter(torch.ones(3, 2))]),
    ]
    for _ in range(3):
        model(torch.randn(5, 4)).sum().backward()
        for optimizer in optimizers[:2]:
            optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], max_lr=0.1, total_steps=10)
    extra = {
        "model": dict(model.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "rng": torch.get_rng_state(),
        "position": {"epoch": 3, "batch": 17, "order": np.random.default_rng(0).permutation(50)},
        "scheduler": {name: value for name, value in scheduler.state_dict().items() if not callable(value)},
    }
    found = there_and_back(extra)
    assert isinstance(found, dict)
    require_same({**found, "scheduler": None}, {**extra, "scheduler": None})
    model.load_state_dict(found["model"])
    for optimizer, state in zip(optimizers, found["optimizers"], strict=True):
        optimizer.load_state_dict(state)


def test_ordered_and_default_dicts_come_back_as_plain_ones() -> None:
    extra = [collections.OrderedDict(a=1), collections.defaultdict(int, b=2)]
    require_same(there_and_back(extra), [{"a": 1}, {"b": 2}])


def test_two_tensors_under_keys_that_look_the_same_stay_apart() -> None:
    nan = float("nan")
    found = there_and_back({nan: np.zeros(1), float("nan"): np.ones(1)})
    assert isinstance(found, dict)
    assert sorted(float(value[0]) for value in found.values()) == [0.0, 1.0]


def test_other_programs_read_the_tensors_under_their_paths(tmp_path: Path) -> None:
    path = tmp_path / "extra.safetensors"
    path.write_bytes(encode_extra({"model": {"w": torch.ones(2, 3, dtype=torch.bfloat16)}, "order": np.arange(5)}))
    with safetensors.safe_open(str(path), "pt") as opened:
        assert sorted(opened.keys()) == ["extra['model']['w']", "extra['order']"]
        assert torch.equal(opened.get_tensor("extra['model']['w']"), torch.ones(2, 3, dtype=torch.bfloat16))
        assert opened.metadata()["format"] == "shardam-extra"


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"optimizer": {"state": [object()]}}, r"extra\['optimizer'\]\['state'\]\[0\] is a builtins.object; .*state_dict"),
        ([torch.nn.Linear(1, 1)], r"extra\[0\] is a torch.nn.modules.linear.Linear"),
        ({"f": len}, r"extra\['f'\] is a builtins.builtin_function"),
        ((Colour.RED,), r"extra\[0\] is a .*Colour"),
        (Point(1, 2), "extra is a .*Point"),
        ({1}, "extra is a builtins.set"),
        ({"a": {Colour.RED: 1}}, r"extra\['a'\] has the key <Colour.RED: 1>"),
        ({"a": np.array([object()])}, r"extra\['a'\] is a NumPy array of dtype object"),
        (np.zeros(1, [("x", "i4")]), "extra is a NumPy array of dtype"),
        ([torch.eye(2).to_sparse()], r"extra\[0\] is a Tensor of layout torch.sparse_coo"),
        (torch.ones(1, device="meta"), "meta device"),
        (bytearray(b"x"), "extra is a builtins.bytearray"),
    ],
)
def test_a_value_of_another_type_is_named_by_its_path(extra: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode_extra(extra)


def test_a_container_within_itself_is_refused() -> None:
    extra: list[object] = []
    extra.append({"again": extra})
    with pytest.raises(BadOption, match=r"extra\[0\]\['again'\] contains itself"):
        encode_extra(extra)


def test_too_many_plain_values_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardam._tensor_file.MAX_HEADER_BYTES", 1000)
    assert MAX_HEADER_BYTES == 100 * 10**6
    with pytest.raises(BadOption, match="put lists of numbers into NumPy arrays"):
        encode_extra(list(range(1000)))


class Payload:
    """Says so when it is unpickled."""

    ran = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return setattr, (Payload, "ran", True)


@pytest.mark.case("C081")
def test_a_pickle_in_a_files_place_is_refused_and_never_runs() -> None:
    with pytest.raises(CheckpointDamaged, match="rank 0 is no safetensors file"):
        decode_extra(pickle.dumps(Payload()), "rank 0")
    assert not Payload.ran


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_file_that_was_cut_off_is_refused(cut: int) -> None:
    data = encode_extra({"a": np.arange(100)})
    with pytest.raises(CheckpointDamaged):
        decode_extra(data[:cut], "rank 0")


def test_another_format_and_a_newer_version_are_refused() -> None:
    with pytest.raises(CheckpointDamaged, match="is no addition to a checkpoint"):
        decode_extra(write_tensors({"w": RawTensor("F32", (1,), b"\0" * 4)}, {}), "rank 0")
    newer = write_tensors({}, {"format": "shardam-extra", "version": "2", "structure": "{}"})
    with pytest.raises(VersionMismatch, match="version '2'"):
        decode_extra(newer, "rank 0")


@pytest.mark.parametrize(
    "structure",
    ["{}", "[", '{"array":"x","dtype":"O","shape":[]}', '{"exec":"x"}', '{"tensor":"no","dtype":"save","shape":[]}'],
)
def test_a_structure_that_is_none_is_refused(structure: str) -> None:
    data = write_tensors({}, {"format": "shardam-extra", "version": "1", "structure": structure})
    with pytest.raises(CheckpointDamaged):
        decode_extra(data, "rank 0")


@pytest.mark.parametrize(
    "node",
    [
        {"array": "a", "dtype": "<f8", "shape": [10**11]},
        {"array": "a", "dtype": "<f8", "shape": [-1]},
        {"array": "a", "dtype": "<f8", "shape": [10**30]},
        {"tensor": "a", "dtype": "float32", "shape": [10**13]},
        {"tensor": "a", "dtype": "float32", "shape": [-1]},
        {"tensor": "a", "dtype": "float32", "shape": [3]},
        {"float": "00"},
    ],
)
def test_a_shape_that_its_values_do_not_fill_is_refused_before_room_is_made(node: dict[str, object]) -> None:
    metadata = {"format": "shardam-extra", "version": "1", "structure": json.dumps(node)}
    with pytest.raises(CheckpointDamaged, match="rank 0"):
        decode_extra(write_tensors({"a": RawTensor("U8", (0,), b"")}, metadata), "rank 0")


def test_containers_that_are_nested_too_deep_are_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadOption, match="too deep"):
        encode_extra(deep)
