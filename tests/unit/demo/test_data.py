"""The demo's three sources of data."""

from pathlib import Path

import numpy as np
import pytest

from shardam.demo import data_movielens, prepare
from shardam.demo.data_file import read_file
from shardam.demo.data_movielens import FIELDS, read_movielens
from shardam.demo.data_synthetic import make_synthetic
from shardam.demo.dataset import ClickData
from shardam.demo.features import row_id
from shardam_proto.errors import BadOption


def _same(one: ClickData, other: ClickData) -> bool:
    arrays = ("row_ids", "dense", "labels", "is_test")
    words = ("title", "notes", "fields", "shown_field", "row_titles")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays) and all(
        getattr(one, name) == getattr(other, name) for name in words
    )


def test_a_seed_of_synthetic_data_gives_the_same_samples_and_another_seed_others() -> None:
    assert _same(make_synthetic(5, 500), make_synthetic(5, 500))
    assert not np.array_equal(make_synthetic(5, 500).row_ids, make_synthetic(6, 500).row_ids)


def test_synthetic_data_have_the_shape_of_click_logs_and_say_what_they_are() -> None:
    data = make_synthetic(0, 4_000)
    assert data.dense.shape == (4_000, 13)
    assert data.row_ids.shape == (4_000, 26)
    assert data.row_ids.dtype == np.int64
    assert data.dense.dtype == data.labels.dtype == np.float32
    assert np.abs(data.row_ids).max() > 2**53
    assert data.num_test == 400
    assert "synthetic" in data.title
    assert 0.2 < data.labels.mean() < 0.45


def test_synthetic_ids_are_skewed_in_every_field() -> None:
    data = make_synthetic(0, 4_000)
    for field in range(26):
        _, counts = np.unique(data.row_ids[:, field], return_counts=True)
        assert counts.max() >= 1.5 * np.median(counts)


def test_prepared_data_are_read_back_as_they_were_saved(tmp_path: Path) -> None:
    data = make_synthetic(1, 300)
    data.save(tmp_path / "clicks.npz")
    assert _same(ClickData.load(tmp_path / "clicks.npz"), data)


def _write_movielens(folder: Path, num_ratings: int = 20) -> None:
    """Made-up ratings in the columns of the data package."""
    (folder / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        "1\t24\tM\ttester\t01234\n2\t60\tF\tpilot\tT8H1N\n"
    )
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '10\tA "Made-up" Film\t1995\tDrama\n11\tAnother\tV\tComedy\n'
    )
    ratings = [f"{1 + k % 2}\t{10 + k // 2 % 2}\t{2 + k // 2 % 3}\t{3_600 * k}\n" for k in reversed(range(num_ratings))]
    (folder / "ml-100k.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(ratings))


def test_movielens_samples_carry_the_nine_fields_in_order(tmp_path: Path) -> None:
    _write_movielens(tmp_path, 60)
    data = read_movielens(tmp_path)
    assert data.fields == FIELDS == ("user", "item", "age", "gender", "occupation", "zip", "year", "hour", "weekday")
    assert data.row_ids[-1].tolist() == [
        1,
        10,
        1,
        row_id("M"),
        row_id("tester"),
        row_id("012"),
        1995,
        0,
        3,
    ]  # the rating at 0 s
    assert data.row_ids[-2].tolist() == [2, 10, 6, row_id("F"), row_id("pilot"), row_id("T8H"), 1995, 1, 3]
    assert row_id("V") in data.row_ids[:, 6]
    assert data.row_titles["10"] == 'A "Made-up" Film'
    assert data.dense.shape == (60, 0)
    assert data.labels.tolist() == [float(2 + k // 2 % 3 >= 4) for k in reversed(range(60))]
    assert data.num_test == 6
    assert data.is_test[:6].all()  # the file is in reverse order of time


def test_movielens_states_source_citation_and_terms(tmp_path: Path) -> None:
    _write_movielens(tmp_path, 60)
    notes = " ".join(read_movielens(tmp_path).notes)
    assert "GroupLens" in notes
    assert "Harper" in notes
    assert "Konstan. 2015" in notes
    assert "research use only, no redistribution" in notes


def test_movielens_with_a_column_missing_names_the_column(tmp_path: Path) -> None:
    _write_movielens(tmp_path)
    (tmp_path / "ml-100k.user").write_text("user_id:token\tage:token\n1\t24\n")
    with pytest.raises(BadOption, match=r"no column 'gender'.*make setup"):
        read_movielens(tmp_path)


def test_without_movielens_the_demo_falls_back_to_synthetic_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_movielens, "PACKAGE", "no-such-package-is-installed")
    data, reason = prepare.choose_data(None, 3)
    assert "synthetic" in data.title
    assert "make setup" in reason


def test_without_movielens_asking_for_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_movielens, "PACKAGE", "no-such-package-is-installed")
    with pytest.raises(BadOption, match="make setup"):
        prepare.choose_data("movielens", 0)


def _write_clicks(path: Path, separator: str = ",", lines: int = 40) -> Path:
    rows = [("label", "cat_site", "dense_age", "cat_user")]
    rows += [(str(k % 2), f"site-{k % 3}", "" if k % 5 == 0 else str(k / 2), str(2**53 + 1 + k)) for k in range(lines)]
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_file_s_columns_become_fields_dense_features_and_labels(tmp_path: Path, separator: str) -> None:
    data = read_file(_write_clicks(tmp_path / "clicks.txt", separator))
    assert data.fields == ("cat_site", "cat_user")
    assert data.row_ids[0].tolist() == [row_id("site-0"), 2**53 + 1]
    assert data.row_ids[39].tolist() == [row_id("site-0"), 2**53 + 40]
    assert data.labels.tolist() == [0.0, 1.0] * 20
    assert data.dense.shape == (40, 1)
    assert data.dense[0] == data.dense[5] == data.dense.min()
    assert data.is_test.tolist() == [False] * 36 + [True] * 4
    assert data.shown_field == "cat_site"


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (0, "label,cat_a,price", "line 1: unknown column 'price'"),
        (0, "cat_a,dense_b,cat_c", "line 1: no column 'label'"),
        (0, "label,dense_a,dense_b", r"line 1: no column 'cat_\*'"),
        (0, "label,cat_a,cat_a", "line 1: column 'cat_a' stands twice"),
        (0, "label,cat_a b,dense_a", "'cat_a b' is not allowed"),
        (3, "2,x,1", "line 4: label must be 0 or 1, got '2'"),
        (3, "1,x,much", "line 4: dense_b must be a finite number or empty, got 'much'"),
        (3, "1,x,nan", "line 4: dense_b must be a finite number or empty, got 'nan'"),
        (3, "1,x", "line 4: 2 columns, but the header has 3"),
        (3, '1,"x,1', "cannot be read"),
    ],
)
def test_a_file_s_mistake_is_named_with_line_and_value(tmp_path: Path, line: int, text: str, message: str) -> None:
    lines = ["label,cat_a,dense_b"] + [f"{k % 2},x{k},{k}" for k in range(40)]
    lines[line] = text
    path = tmp_path / "clicks.csv"
    path.write_text("\n".join(lines))
    with pytest.raises(BadOption, match=message):
        read_file(path)


def test_a_file_that_is_not_there_empty_or_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"cannot be read.*movielens, synthetic or a CSV"):
        read_file(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(BadOption, match="no column 'label'"):
        read_file(tmp_path / "empty.csv")
    with pytest.raises(BadOption, match="5 samples; at least 20"):
        read_file(_write_clicks(tmp_path / "short.csv", lines=5))


def test_a_file_of_one_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("label,cat_a\n" + "1,x\n" * 30)
    with pytest.raises(BadOption, match="27 of 27 training samples have label 1"):
        read_file(path)
