from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from atoll.workload.builtin import NAMES
from atoll.workload.requests import Requests
from atoll.workload.stats import Summary, summarise
from tests.cli.commands import Atoll, refused

BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,API log\n"
    "60,ChatGPT,30,0,30,Conversation log\n"
    "61,ChatGPT,x,9,30,Conversation log\n"
    "118,ChatGPT,417,276,693,Conversation log\n"
)


@pytest.fixture
def atoll(atoll: Atoll, tmp_path: Path) -> Atoll:
    """Runs `atoll trace` in a folder that holds one trace."""
    (tmp_path / "b.csv").write_text(BURSTGPT)
    return partial(atoll, "trace")


def test_list(atoll: Atoll) -> None:
    done = atoll("list")
    assert (done.code, done.err) == (0, "")
    rows = atoll("list", "--json").json
    assert tuple(row["name"] for row in rows) == NAMES
    for name in NAMES:
        assert name in done.out


def test_describe_draws_rate_and_lengths(atoll: Atoll) -> None:
    done = atoll("describe", "poisson:20/s lengths=lognormal:500/1x50/1 for=5min")
    assert (done.code, done.err) == (0, "")
    for words in (
        "rate over time",
        "lengths: share of requests",
        "CV 0.9",
        "a prompts   b answers",
    ):
        assert words in done.out
    assert "measured" not in done.out
    assert "\x1b[" not in done.out


@pytest.mark.slow
def test_a_built_in_is_described_over_a_million_requests(atoll: Atoll) -> None:
    done = atoll("describe", "azure-conv", "--json")
    assert done.json["stats"]["requests"] == 1_000_000
    for row in done.json["match"]:
        assert row["drawn"] == pytest.approx(row["measured"], rel=0.25), row["statistic"]


def test_describe_shows_how_a_built_in_matches(
    atoll: Atoll, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summarise_some(chunks: Iterable[Requests]) -> Summary:
        return summarise(islice(chunks, 1))

    monkeypatch.setattr("atoll.workload.stats.summarise", summarise_some)
    match = {
        row["statistic"]: row for row in atoll("describe", "azure-conv", "--json").json["match"]
    }
    assert match["input_mean"]["measured"] == 1154.7
    # How counts vary needs more of them; that of lengths does not.
    for name in ("input_mean", "output_mean"):
        row = match[name]
        assert row["drawn"] == pytest.approx(row["measured"], rel=0.25), name
    assert "measured" in atoll("describe", "azure-conv").out


def test_describe_as_json_is_whole(atoll: Atoll) -> None:
    done = atoll("describe", "multimodal@50/s for=2min", "--seed", "3", "--json")
    stats = done.json["stats"]
    assert stats["requests"] == pytest.approx(6000, rel=0.1)
    assert stats["classes"] == {"image": stats["requests"]}
    assert done.json["match"] == []
    rate, lengths = done.json["pictures"]
    assert sum(rate["curves"][0]["y"]) > 0
    for drawn in lengths["curves"]:
        assert drawn["x"] == sorted(drawn["x"])
        assert drawn["y"] == sorted(drawn["y"])
        assert drawn["y"][-1] == pytest.approx(100.0)
    assert atoll("describe", "multimodal@50/s for=2min", "--seed", "3", "--json").out == done.out
    assert atoll("describe", "multimodal@50/s for=2min", "--json").out != done.out


def test_describe_says_what_became_of_every_row(atoll: Atoll) -> None:
    done = atoll("describe", "b.csv", "--json")
    (report,) = done.json["files"]
    assert (report["rows"], report["bad"]) == (5, 1)
    assert report["left_out"] == {"failed requests (no answer)": 1}
    assert done.json["stats"]["requests"] == 3
    assert done.json["stats"]["models"] == {"ChatGPT": 2, "GPT-4": 1}
    assert "b.csv: 1 of 5 rows are bad: Request tokens: is not a whole number" in done.err
    assert "line 5: Request tokens: 'x' is not" in done.err
    assert "b.csv: left out 1 of 5 rows: failed requests (no answer)" in done.err
    assert atoll("describe", "b.csv").code == 0


@pytest.mark.usefixtures("sketched")
def test_describe_writes_pictures(atoll: Atoll, tmp_path: Path) -> None:
    done = atoll("describe", "poisson:5/s n=500", "-o", "a.png", "--out", "a.html", "--json")
    assert done.err == "wrote a.png\nwrote a.html\n"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "500 in" in page


def test_one_request_can_be_described(atoll: Atoll) -> None:
    done = atoll("describe", "poisson:5/s n=1 lengths=7x7")
    assert (done.code, done.err) == (0, "")


def test_generate_to_standard_output(atoll: Atoll) -> None:
    done = atoll("generate", "poisson:2/s lengths=10x5 n=3 models=a:1,b:1")
    assert (done.code, done.err) == (0, "")
    rows = list(csv.DictReader(done.out.splitlines()))
    assert [row["input_tokens"] for row in rows] == ["10"] * 3
    assert {row["model"] for row in rows} <= {"a", "b"}
    assert atoll("generate", "poisson:2/s lengths=10x5 n=3 models=a:1,b:1").out == done.out


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl", "t.jsonl.gz"])
def test_generate_to_a_file_that_reads_back(atoll: Atoll, tmp_path: Path, name: str) -> None:
    done = atoll("generate", "azure-code@50/s n=500", "-o", name, "--seed", "4", "--json")
    assert done.code == 0
    assert done.err == f"wrote {name}\n"
    assert done.json["requests"] == 500
    assert (done.json["format"], done.json["wrote"]) == (
        "plain" if "csv" in name else "mooncake",
        name,
    )
    first = (tmp_path / name).read_bytes()
    again = atoll("describe", name, "--json")
    for side in ("input", "output"):
        assert again.json["stats"][side] == done.json["stats"][side]
    atoll("generate", "azure-code@50/s n=500", "-o", name, "--seed", "4")
    assert (tmp_path / name).read_bytes() == first


def test_convert(atoll: Atoll, tmp_path: Path) -> None:
    done = atoll("convert", "b.csv", "out.csv.gz", "--json")
    assert done.json["requests"] == 3
    assert "bad" in done.err
    text = gzip.decompress((tmp_path / "out.csv.gz").read_bytes()).decode()
    assert text.splitlines() == [
        "arrival_s,input_tokens,output_tokens,model",
        "0.000000,472,18,ChatGPT",
        "40.000000,1087,230,GPT-4",
        "113.000000,417,276,ChatGPT",
    ]


def test_convert_at_another_rate(atoll: Atoll, tmp_path: Path) -> None:
    assert atoll("convert", "b.csv", "fast.csv", "--rate", "x2").code == 0
    rows = list(csv.DictReader((tmp_path / "fast.csv").read_text().splitlines()))
    assert [float(row["arrival_s"]) for row in rows] == [0.0, 20.0, 56.5]
    done = atoll("convert", "b.csv", "rated.csv", "--rate", "3/s", "--json")
    assert done.json["stats"]["rate_per_s"] == pytest.approx(3.0, rel=1e-4)
    assert atoll("convert", "b.csv", "more.csv", "--rate", "x2", "--keep", "clock").code == 0
    assert len((tmp_path / "more.csv").read_text().splitlines()) == 7


BAD = [
    (("describe", "b.csv", "--strict"), 3, ("b.csv:5: Request tokens: 'x' is not",)),
    (("describe", "b.csv", "--bad-limit", "0"), 3, ("more than 0 bad rows", "line 5")),
    (("describe", "poisson:5/s", "-o", "a.pdf"), 2, ("a.pdf",)),
    (("generate", "poisson:5/s", "--json"), 2, ("-o FILE",)),
    (("generate", "poisson:5/s", "-o", "x.parquet"), 2, (".csv or .jsonl",)),
    (("generate", "poisson:5/s", "-o", "no/x.csv"), 3, ("no such folder",)),
    (("convert", "b.csv", "x.txt"), 2, (".csv or .jsonl",)),
    (("convert", "b.csv", "x.csv", "--format", "azure"), 3, ("TIMESTAMP",)),
    (("convert", "b.csv", "x.csv", "--rate", "7"), 3, ("no unit",)),
]


@pytest.mark.parametrize(("args", "code", "said"), BAD, ids=lambda v: str(v)[:50])
def test_refused(
    atoll: Atoll, tmp_path: Path, args: tuple[str, ...], code: int, said: tuple[str, ...]
) -> None:
    refused(atoll(*args), code, *said)
    assert {path.name for path in tmp_path.iterdir()} == {"b.csv"}
