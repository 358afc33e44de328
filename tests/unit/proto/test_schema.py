"""Table schemas: the alphabet of names, the rules of fields, the protobuf form."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto.errors import BadOption
from shardam_proto.schema import Constant, Initializer, Normal, TableSpec, Uniform, XavierNormal, XavierUniform

FINITE = st.floats(-1e6, 1e6)
INITIALIZERS = st.one_of(
    st.builds(Normal, FINITE, st.floats(0, 1e6)),
    st.tuples(FINITE, FINITE).map(lambda pair: Uniform(min(pair), max(pair))),
    st.builds(Constant, FINITE),
    st.just(XavierUniform()),
    st.just(XavierNormal()),
)


@given(
    st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z"),
    st.integers(1, 65_536),
    INITIALIZERS,
    st.integers(1, 2**63 - 1),
    st.booleans(),
)
def test_a_schema_survives_its_protobuf_form(name: str, dim: int, init: Initializer, bound: int, has_padding: bool) -> None:
    spec = TableSpec(name, dim, init=init, num_embeddings=bound, padding_idx=bound - 1 if has_padding else None)
    assert TableSpec.from_proto(spec.to_proto()) == spec


def test_an_absent_bound_and_padding_row_stay_absent_and_zero_stays_zero() -> None:
    for spec in (TableSpec("t", 1), TableSpec("t", 1, padding_idx=0), TableSpec("t", 1, num_embeddings=1)):
        assert TableSpec.from_proto(spec.to_proto()) == spec


@pytest.mark.case("C046")
@pytest.mark.parametrize("name", ["user/id", "ü名", "schema:Thing", "../x", "", "x" * 129, ".a", "-a", "a b", "a%2Fb", "a\n"])
def test_names_outside_the_alphabet_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(BadOption, match="1 to 128 characters") as error:
        TableSpec(name, 1)
    assert error.value.metadata["name"] == name


@pytest.mark.case("C046")
@pytest.mark.parametrize("name", ["a.b", "A", "a", "0", "_x", "x" * 128, "a-b_c.d"])
def test_names_of_the_alphabet_are_taken_as_they_are(name: str) -> None:
    assert TableSpec(name, 1).name == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 0}, "dim must be"),
        ({"dim": 65_537}, "dim must be"),
        ({"dim": 1.0}, "dim must be"),
        ({"dim": True}, "dim must be"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"step": "epoch"}, "step must be"),
        ({"optimizer": "sgd"}, "'sparse_adam'"),
        ({"num_embeddings": 0}, "num_embeddings must be"),
        ({"num_embeddings": 2.5}, "num_embeddings must be"),
        ({"num_embeddings": 5, "padding_idx": 5}, "padding_idx 5 lies outside"),
        ({"num_embeddings": 5, "padding_idx": -6}, "padding_idx -6 lies outside"),
        ({"padding_idx": 2**63}, "padding_idx must be"),
        ({"max_rows_per_shard": -1}, "max_rows_per_shard must be"),
        ({"init": XavierUniform()}, "needs num_embeddings"),
        ({"init": "normal"}, "init must be"),
    ],
)
def test_a_field_outside_its_rule_is_refused_and_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        TableSpec(**{"name": "t", "dim": 4, **fields})  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("values", [(math.nan, 1.0), (0.0, -1.0), (math.inf, 1.0), (0.0, math.nan), ("0", 1.0)])
def test_an_initializer_with_a_bad_number_is_refused(values: tuple[float, float]) -> None:
    with pytest.raises(BadOption, match="Normal"):
        Normal(*values)


@pytest.mark.case("C007")
def test_a_negative_padding_row_counts_from_the_end_of_a_bounded_table_only() -> None:
    assert TableSpec("t", 1, num_embeddings=10, padding_idx=-1).padding_idx == 9
    assert TableSpec("t", 1, padding_idx=-1).padding_idx == -1
