"""Trace files: every format, and every row accounted for."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError, InputError, UnknownNameError, UsageError
from atoll.workload import trace_reading, trace_rows
from atoll.workload.formats import FORMATS
from atoll.workload.requests import PrefixBlocks, Requests, collect
from atoll.workload.traces import Trace, read_trace
from atoll.workload.writing import write_trace

PLAIN = "arrival_s,input_tokens,output_tokens\n"
AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 23:59:59.500000+00:00,2399,6\n"
    "2024-05-11 00:00:01.000000+00:00,76,15\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,API log\n"
    "60,ChatGPT,30,0,30,Conversation log\n"
    "118,ChatGPT,417,276,693,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3052, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
)


def trace(folder: Path, text: str | bytes, name: str = "t.csv", **settings: object) -> Trace:
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return read_trace(folder / name, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "no-ending"])
def test_azure(tmp_path: Path, name: str) -> None:
    found = collect(trace(tmp_path, AZURE_2023, name))
    assert found.arrival_s == pytest.approx([0.0, 4.314579], abs=1e-6)
    assert found.input.tolist() == [374, 396]
    assert found.output.tolist() == [44, 109]
    assert (found.models, found.classes) == (("",), ("text",))


def test_azure_with_time_zones(tmp_path: Path) -> None:
    assert collect(trace(tmp_path, AZURE_2024)).arrival_s == pytest.approx([0.0, 1.5], abs=1e-6)
    shifted = AZURE_2024.replace("2024-05-11 00:00:01.000000+00:00", "2024-05-11 02:00:01+02:00")
    assert collect(trace(tmp_path, shifted)).arrival_s == pytest.approx([0.0, 1.5], abs=1e-6)


def test_several_time_zones_are_converted_and_said(tmp_path: Path) -> None:
    assert not read_all(trace(tmp_path, AZURE_2024)).is_mixed
    utc = AZURE_2024.replace("01.000000+00:00", "01Z")
    assert not read_all(trace(tmp_path, utc)).is_mixed  # two ways to write one zone
    shifted = AZURE_2024.replace("2024-05-11 00:00:01.000000+00:00", "2024-05-11 02:00:01+02:00")
    report = read_all(trace(tmp_path, shifted))
    assert report.is_mixed
    assert report.zones == {"+00:00": 2, "+02:00": 3}


@pytest.mark.parametrize("bare", [2, 3])
def test_times_of_which_only_some_state_their_zone_are_refused(tmp_path: Path, bare: int) -> None:
    """Nobody can know whether two hours lie between them."""
    lines = AZURE_2024.splitlines()
    lines[bare - 1] = lines[bare - 1].replace("+00:00", "")
    with pytest.raises(InputError) as caught:
        collect(trace(tmp_path, "\n".join(lines) + "\n"))
    assert f"others do not (line {bare})" in str(caught.value)
    assert f"+00:00 at line {5 - bare}" in str(caught.value)
    assert caught.value.hint


def test_what_is_no_date_has_no_zone(tmp_path: Path) -> None:
    odd = AZURE_2023 + "yesterday,5,5\n"
    report = read_all(trace(tmp_path, odd))
    assert (report.bad, list(report.zones)) == (1, [""])


def read_all(read: Trace) -> trace_reading.RowReport:
    collect(read)
    return read.report


def test_burstgpt_leaves_failures_out_and_says_so(tmp_path: Path) -> None:
    own = trace(tmp_path, BURSTGPT)
    found = collect(own)
    assert found.arrival_s.tolist() == [5.0, 45.0, 118.0]
    assert [found.models[index] for index in found.model] == ["ChatGPT", "GPT-4", "ChatGPT"]
    assert own.report.left_out == {"failed requests (no answer)": 1}
    assert (own.report.rows, own.report.accepted, own.report.bad) == (4, 3, 0)
    assert own.report.ignored_columns == ()


def test_mooncake(tmp_path: Path) -> None:
    found = collect(trace(tmp_path, MOONCAKE, "t.jsonl.gz"))
    assert found.arrival_s.tolist() == [0.0, 3.052]
    assert found.prefix is not None
    assert [found.prefix.of(row).tolist() for row in (0, 1)] == [[0, 1, 2], [0, 14]]
    assert found.prefix.block_tokens == 512


def test_plain_with_everything(tmp_path: Path) -> None:
    text = (
        "model,arrival_s,input_tokens,output_tokens,class,items,prefix_block_ids_64,client\n"
        '"a,b",0.5,10,1,image,2,7 8,x\n'
        "m,1e0,20,2,,0,,y\n"
    )
    own = trace(tmp_path, text)
    found = collect(own)
    assert found.models == ("a,b", "m")
    assert [found.classes[index] for index in found.klass] == ["image", "text"]
    assert found.items is not None
    assert found.items.tolist() == [2, 0]
    assert found.prefix is not None
    assert found.prefix.block_tokens == 64
    assert found.prefix.of(0).tolist() == [7, 8]
    assert own.report.ignored_columns == ("client",)


def test_images_make_the_class(tmp_path: Path) -> None:
    text = "arrival_s,image_count,input_tokens,output_tokens\n0,0,5,5\n1,3,5,5\n"
    found = collect(trace(tmp_path, text))
    assert [found.classes[index] for index in found.klass] == ["text", "image"]


def test_line_ends_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeff" + PLAIN.replace("\n", "\r\n") + "\r\n0,1,2\r\n\r\n1,3,4\r"
    own = trace(tmp_path, text)
    found = collect(own)
    assert found.output.tolist() == [2, 4]
    assert own.report.rows == 2


BAD = {
    "a word": ("0,x,5", "input_tokens: 'x' is not a whole number from 1 to 10,000,000"),
    "empty": ("0,,5", "input_tokens"),
    "zero": ("0,5,0", "output_tokens: '0' is not"),
    "negative": ("0,-5,5", "input_tokens: '-5'"),
    "half": ("0,5.5,5", "input_tokens: '5.5'"),
    "huge": ("0,1e9,5", "input_tokens: '1e9'"),
    "nan": ("0,nan,5", "input_tokens"),
    "before the start": ("-1,5,5", "arrival_s: '-1' is not a time of 0 s or more"),
    "never": ("inf,5,5", "arrival_s"),
    "no time": ("soon,5,5", "arrival_s: 'soon'"),
    "too few": ("0,5", "'2 fields' not 3 fields"),
    "a long quote": ('0,"' + "9" * 200_000 + '",5', "'0 fields' not 3 fields"),
    "too many": ("0,5,5,5", "'4 fields' not 3 fields"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_counted_with_their_lines(tmp_path: Path, case: str) -> None:
    row, words = BAD[case]
    text = f"{PLAIN}0,1,1\n{row}\n2,3,3\n"
    own = trace(tmp_path, text)
    assert collect(own).input.tolist() == [1, 3]
    assert (own.report.rows, own.report.bad, own.report.accepted) == (3, 1, 2)
    ((line, what),) = own.report.examples
    assert line == 3
    assert words in what
    assert sum(own.report.reasons.values()) == 1
    with pytest.raises(InputError) as caught:
        collect(trace(tmp_path, text, strict=True))
    assert caught.value.line == 3
    assert str(caught.value).startswith(f"{tmp_path}/t.csv:3: ")


@pytest.mark.parametrize(
    "row",
    ["{", "[]", "7", '{"timestamp": 1}', '{"timestamp": -1, "input_length": 1, "output_length": 1}',
     '{"timestamp": true, "input_length": 1, "output_length": 1}',
     '{"timestamp": NaN, "input_length": 1, "output_length": 1}',
     '{"timestamp": 1, "input_length": 1.5, "output_length": 1}',
     '{"timestamp": 1, "input_length": "9", "output_length": 1}',
     '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": ["x"]}',
     '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": 3}',
     '{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [99999999999999999999]}',
     "[" * 100_000],
)  # fmt: skip
def test_bad_json_lines(tmp_path: Path, row: str) -> None:
    own = trace(tmp_path, f"{MOONCAKE}{row}\n", "t.jsonl")
    assert len(collect(own)) == 2
    assert own.report.examples[0][0] == 3


def test_bad_dates(tmp_path: Path) -> None:
    own = trace(tmp_path, AZURE_2023 + "2023-13-16 18:15:46.68,1,1\n12,1,1\nnow,1,1\n")
    assert len(collect(own)) == 2
    assert [line for line, _ in own.report.examples] == [4, 5, 6]


def test_too_many_bad_rows_stop_the_reading(tmp_path: Path) -> None:
    text = PLAIN + "0,1,1\n" + "x,1,1\n" * 11
    assert len(collect(trace(tmp_path, text, bad_limit=11))) == 1
    with pytest.raises(InputError, match="more than 10 bad rows; the first is at line 3") as caught:
        collect(trace(tmp_path, text, bad_limit=10))
    assert caught.value.line == 13


cell = st.one_of(
    st.integers(-2, 500).map(str), st.floats(0, 1e4).map(str), st.text(max_size=4), st.just("")
)


@given(st.lists(st.lists(cell, min_size=1, max_size=4), max_size=25))
def test_every_row_is_accounted_for(table: list[list[str]]) -> None:
    lines = [",".join(row).replace("\n", " ").replace("\r", " ") for row in table]
    kept = [line for line in lines if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        text = PLAIN + "0,1,1\n" + "\n".join(lines)
        try:
            own = trace(Path(folder), text.encode("utf-8", "replace"))
            found = collect(own)
        except InputError:
            pytest.fail("junk in rows must not stop a trace")
    report = own.report
    assert report.rows == len(kept) + 1
    assert report.accepted == len(found) == report.rows - report.bad
    assert np.all(np.diff(found.arrival_s) >= 0)
    assert found.input.min() >= 1


# Order.


def test_rows_a_little_out_of_order_are_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_rows, "HELD", 8)
    monkeypatch.setattr(trace_reading, "BLOCK_BYTES", 64)
    order = list(range(100))
    for at in range(0, 96, 7):
        order[at], order[at + 3] = order[at + 3], order[at]
    own = trace(tmp_path, PLAIN + "".join(f"{at},{at + 1},1\n" for at in order))
    assert collect(own).input.tolist() == list(range(1, 101))
    assert own.report.bad == 0
    assert own.report.reordered > 0


def test_rows_far_out_of_order_are_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_rows, "HELD", 8)
    monkeypatch.setattr(trace_reading, "BLOCK_BYTES", 64)
    own = trace(tmp_path, PLAIN + "".join(f"{at},1,1\n" for at in [*range(10, 60), 3, 60]))
    found = collect(own)
    assert found.arrival_s.tolist() == [float(at) for at in [*range(10, 60), 60]]
    ((line, what),) = own.report.examples
    assert line == 52
    assert "too late" in what


def test_blocks_are_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collect(trace(tmp_path, BURSTGPT))
    for size in (1, 7, 50):
        monkeypatch.setattr(trace_reading, "BLOCK_BYTES", size)
        again = collect(trace(tmp_path, BURSTGPT))
        assert again.arrival_s.tolist() == whole.arrival_s.tolist()
        assert again.models == whole.models


# Files that are no traces.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        (PLAIN, "no requests"),
        (PLAIN + "x,1,1\n", "no requests; 1 bad rows, the first at line 2: arrival_s: 'x'"),
        ("hello world\n1\n", "names no known columns"),
        ("input_tokens,output_tokens\n1,2\n", "no arrivals"),
        (b"\xff\xfe\x00" + PLAIN.encode(), "not UTF-8"),
        (gzip.compress(AZURE_2023.encode(), mtime=0)[:-12], "damaged or cut short"),
        (b"\x1f\x8bnot really", "damaged or cut short"),
        (PLAIN + "1" * (2**20 + 9), "more than 1048576 bytes"),
    ],
    ids=range(10),
)
def test_what_is_no_trace(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        collect(trace(tmp_path, text))
    assert "t.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_files_and_wrong_formats(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        collect(read_trace(tmp_path / "absent.csv"))
    with pytest.raises(UnknownNameError, match=", ".join(sorted(FORMATS))):
        collect(trace(tmp_path, PLAIN, kind="azur"))
    with pytest.raises(InputError, match="TIMESTAMP,ContextTokens,GeneratedTokens"):
        collect(trace(tmp_path, BURSTGPT, kind="azure"))


def test_a_bomb_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reading, "MAX_BYTES", 10_000)
    monkeypatch.setattr(trace_reading, "BLOCK_BYTES", 1_000)
    with pytest.raises(InputError, match="more than 10000 bytes"):
        collect(trace(tmp_path, PLAIN + "0,1,1\n" * 5_000, "t.csv.gz"))


# Writing.


def full() -> Requests:
    prefix = PrefixBlocks(np.array([0, 2, 2, 3]), np.array([5, 6, 5]), 512)
    return Requests(
        np.array([0.25, 1.5, 1e6 + 1 / 3]),
        np.array([0, 1, 0], np.int16),
        np.array([1, 0, 1], np.int16),
        np.array([10, 20, 30], np.int32),
        np.array([1, 2, 3], np.int32),
        ("a", 'b,"c"'),
        ("text", "image"),
        np.array([1, 0, 4], np.int16),
        prefix,
    )


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz"])
def test_csv_comes_back(tmp_path: Path, name: str) -> None:
    assert write_trace(tmp_path / name, [full().take(slice(0, 2)), full().take(slice(2, 3))]) == 3
    found = collect(read_trace(tmp_path / name, strict=True))
    assert found.arrival_s == pytest.approx(full().arrival_s, abs=1e-6)
    assert [found.models[i] for i in found.model] == ["a", 'b,"c"', "a"]
    assert [found.classes[i] for i in found.klass] == ["image", "text", "image"]
    assert found.items is not None
    assert found.prefix is not None
    assert found.items.tolist() == [1, 0, 4]
    assert [found.prefix.of(i).tolist() for i in range(3)] == [[5, 6], [], [5]]
    first = (tmp_path / name).read_bytes()
    write_trace(tmp_path / name, [full()])
    assert (tmp_path / name).read_bytes() == first


def test_json_lines_come_back(tmp_path: Path) -> None:
    own = collect(trace(tmp_path, MOONCAKE, "in.jsonl"))
    write_trace(tmp_path / "out.jsonl", [own])
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == [json.loads(line) for line in MOONCAKE.splitlines()]
    with pytest.raises(UsageError, match=r"write a \.csv"):
        write_trace(tmp_path / "other.jsonl", [full()])
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"\.csv or \.jsonl"):
        write_trace(tmp_path / "out.parquet", [full()])
    with pytest.raises(InputError, match="cannot write"):
        write_trace(tmp_path / "no" / "out.csv", [full()])
