"""What a record holds, and where (CONTRACT.md, Record)."""

from __future__ import annotations

import pytest

from shardam_kernels.layout import ITEM_BYTES, layout


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_components_follow_each_other_aligned_and_apart_for_every_dim(dtype: str) -> None:
    for dim in range(1, 514):
        record = layout(dim, dtype)
        assert [component.name for component in record.components] == ["weight", "exp_avg", "exp_avg_sq"]
        assert [component.dtype for component in record.components] == [dtype, "float32", "float32"]
        align = 4 if dim < 4 else 16
        end = 0
        for component in record.components:
            assert component.offset_bytes % align == 0
            assert end <= component.offset_bytes < end + align
            end = component.offset_bytes + dim * ITEM_BYTES[component.dtype]
        multiple = 16 if dim < 4 else 64 if record.stride_bytes >= 256 else 32
        assert record.stride_bytes % multiple == 0
        assert end <= record.stride_bytes < end + align + multiple


def test_strides_of_usual_dims_are_kept() -> None:
    strides = {1: 16, 2: 32, 3: 48, 4: 64, 8: 96, 10: 160, 16: 192, 21: 320, 33: 448, 64: 768, 513: 6208}
    assert {dim: layout(dim).stride_bytes for dim in strides} == strides


def test_a_component_is_found_by_name_and_an_unknown_one_named() -> None:
    assert layout(10).component("exp_avg_sq").offset_bytes == 96
    with pytest.raises(KeyError, match=r"no component 'momentum'.*exp_avg_sq"):
        layout(10).component("momentum")


def test_a_dim_below_one_and_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        layout(0)
    with pytest.raises(ValueError, match="got 'int8'"):
        layout(4, "int8")


def test_another_optimizer_lists_its_own_states() -> None:
    record = layout(8, states=("sum",))
    assert [(component.name, component.offset_bytes) for component in record.components] == [("weight", 0), ("sum", 32)]
