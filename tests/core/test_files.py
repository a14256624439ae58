from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.core.files import (
    atomic_write,
    load_yaml,
    load_yaml_file,
    parse_yaml,
    read_text_limited,
)


def test_writing_creates_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    atomic_write(path, "first\n")
    atomic_write(path, b"second\r\n")
    assert path.read_bytes() == b"second\r\n"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_permissions_are_kept_and_new_files_follow_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "key"
    atomic_write(path, "a")
    reference = tmp_path / "reference"
    reference.write_text("a")
    assert path.stat().st_mode == reference.stat().st_mode
    path.chmod(0o600)
    atomic_write(path, "b")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_keeps_pointing_at_its_file(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    atomic_write(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_a_failed_write_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError("disk on fire")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="cannot write: disk on fire"):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupt_is_no_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "plan.json", "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "said", "fix"),
    [
        ("folder", "cannot write: is a directory", "name a file"),
        ("absent/plan.json", "cannot write: no such file or directory", "create the folder"),
        ("file/plan.json", "cannot write: not a directory", "create the folder"),
        ("n" * 300, "cannot write: file name too long", "shorter name"),
        ("n" * 5000 + "/plan.json", "cannot write: file name too long", "shorter name"),
    ],
)
def test_what_cannot_be_written_names_the_path_and_a_fix(
    tmp_path: Path, name: str, said: str, fix: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    with pytest.raises(InputError, match=said) as caught:
        atomic_write(tmp_path / name, "new")
    assert caught.value.path == str(tmp_path / name)
    assert fix in (caught.value.hint or "")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EACCES, "may write"),
        (errno.EROFS, "may write"),
        (errno.ENOSPC, "free some space"),
        (errno.EIO, "somewhere else"),
    ],
)
def test_a_folder_that_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    # Root may write anywhere, so the refusal is made by hand.
    def refuse(*args: object, **kwargs: object) -> tuple[int, str]:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(InputError, match="cannot write: ") as caught:
        atomic_write(tmp_path / "plan.json", "new")
    assert fix in (caught.value.hint or "")
    assert "\n" not in str(caught.value)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    assert read_text_limited(path, 100) == "x" * 100
    with pytest.raises(InputError, match="larger than 99 bytes"):
        read_text_limited(path, 99)


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert read_text_limited(path) == "hello"


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_text_limited(tmp_path / "absent")
    with pytest.raises(InputError, match="directory"):
        read_text_limited(tmp_path)
    (tmp_path / "latin").write_bytes(b"ok\ncaf\xe9\n")
    with pytest.raises(InputError, match=r"latin:2: .*UTF-8"):
        read_text_limited(tmp_path / "latin")


def data_of(text: str) -> object:
    return parse_yaml(text, path="x.yaml").data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("1e9", 1e9),
        ("1E-3", 1e-3),
        (".5", 0.5),
        ("12:30", "12:30"),
        ("L40S:2", "L40S:2"),
        ("2024-01-01", "2024-01-01"),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("-7", -7),
        ("1_000", "1_000"),
        ("~", None),
        ("", None),
        ("null", None),
        ("1.5", 1.5),
        ("24GB", "24GB"),
        ("'1'", "1"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    result = data_of(f"key: {text}\n")
    assert result == {"key": value}
    assert isinstance(result, dict)
    assert type(result["key"]) is type(value)


def test_pyyaml_itself_is_left_alone() -> None:
    assert yaml.safe_load("a: no") == {"a": False}


def test_merge_keys_work_and_may_be_overridden() -> None:
    text = "base: &b {x: 1, y: 2}\nmine: {<<: *b, y: 3}\n"
    assert data_of(text) == {"base": {"x": 1, "y": 2}, "mine": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' is given twice"),
        ("a:\n  x: 1\n  'x': 2\n", 3, "'x' is given twice"),
        ("a: 1\n1: x\n1.0: y\n", 3, "given twice"),
        ("a: 1\nb: [1}\nc: 3\n", 2, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "document"),
        ("a: 1\nb: !!python/object/apply:os.getcwd []\n", 2, "tag"),
        ("a: 1\n? [1, 2]\n: 3\n", 2, "unhashable"),
        ("a: &x\n  - *x\n", 1, "alias"),
    ],
)
def test_errors_carry_path_and_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=problem) as caught:
        load_yaml(path)
    assert caught.value.path == str(path)
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


def test_a_small_file_cannot_expand_without_end() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(InputError, match="too many values"):
        data_of("\n".join(lines))


def test_deep_nesting_is_an_input_error() -> None:
    with pytest.raises(InputError):
        data_of("[" * 50_000 + "]" * 50_000)


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    loaded = load_yaml_file(tmp_path / "empty.yaml")
    assert loaded.data is None
    assert loaded.line("a") is None


def test_lines_of_values(tmp_path: Path) -> None:
    text = "# head\nmodels:\n  - name: a\n    slo:\n      ttft: 1s\n  - name: b\npool: {L4: 3}\n"
    (tmp_path / "fleet.yaml").write_text(text)
    loaded = load_yaml_file(tmp_path / "fleet.yaml")
    assert loaded.line("models") == 2
    assert loaded.line("models", 0, "slo", "ttft") == 5
    assert loaded.line("models", 1) == 6
    assert loaded.line("pool", "L4") == 7
    assert loaded.line("models", 1, "slo", "ttft") == 6  # absent: the line of what should hold it
    assert loaded.line("elsewhere") == 2


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abcxyz"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_json_is_yaml(value: object) -> None:
    assert data_of(json.dumps(value)) == value


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_with_one_line(text: str) -> None:
    try:
        data_of(text)
    except InputError as error:
        assert len(str(error).splitlines()) <= 1  # noqa: PT017
