"""Usage summed up, listed and exported, and the commands that show it."""

from __future__ import annotations

import asyncio
import csv
import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.main import run
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.journal import FinishedRequest
from atoll.runtime.accounts.ledger import rows_of
from atoll.runtime.accounts.usage_report import LISTS, SUMS, UsagePeriod, columns_of, usage
from atoll.telemetry.usage_record import Attempt
from tests.runtime.accounts.helpers import record

DAY_S = 86_400.0
START_S = 1_800_000_000.0


async def fill(url: str) -> str:
    """Write three requests, one of which moved; return the id of the key of two of them."""
    database = await Database.open(url)
    _, key = await database.create_key(NewKey(name="one", owner="me"))
    moved = (
        Attempt("b1", "n1", "ethz", 30, 0.1, "failed", 1.0, 2.0),
        Attempt("b2", "n2", "epfl", 70, 0.2, "ok", 3.0, 4.0),
    )
    done = [
        FinishedRequest(
            "o1", key.id, 0, START_S, record(prompt=10, completion=100, attempts=moved)
        ),
        FinishedRequest(
            "o2",
            key.id,
            0,
            START_S + DAY_S,
            record(model="x", prompt=1, completion=2, started_s=START_S + DAY_S),
        ),
        FinishedRequest(
            "o3",
            None,
            0,
            START_S + DAY_S,
            record(prompt=5, completion=0, outcome="error", started_s=START_S + DAY_S),
        ),
    ]
    await database.write("s", rows_of(done))
    await database.close()
    return key.id


def rows(
    url: str,
    by: str | tuple[str, ...],
    span: UsagePeriod = UsagePeriod(),  # noqa: B008
) -> list[dict[str, Any]]:
    return tables(url, [by], span)[by]


def tables(
    url: str,
    kinds: Iterable[str | tuple[str, ...]],
    span: UsagePeriod = UsagePeriod(),  # noqa: B008
) -> dict[str | tuple[str, ...], list[dict[str, Any]]]:
    """Return several tables of a database that is opened once."""

    async def main() -> dict[str | tuple[str, ...], list[dict[str, Any]]]:
        database = await Database.open(url)
        found = {by: [row async for row in usage(database, by, span)] for by in kinds}
        await database.close()
        return found

    return asyncio.run(main())


def test_sums_count_every_token_once(url: str) -> None:
    key_id = asyncio.run(fill(url))
    for by, found in tables(url, SUMS).items():
        assert sum(row["prompt_tokens"] for row in found) == 16, by
        assert sum(row["completion_tokens"] for row in found) == 102, by
        cost = (10 * 1 + 30 * 2 + 70 * 4) * 1e-6
        assert sum(row["cost_usd"] for row in found) == pytest.approx(cost), by
        assert all(tuple(row) == columns_of(by) for row in found)
    by_provider = {row["provider"]: row for row in rows(url, "provider")}
    assert by_provider["ethz"]["completion_tokens"] == 30
    assert by_provider["ethz"]["prompt_tokens"] == 10
    assert by_provider["epfl"]["completion_tokens"] == 70
    by_key = {row["key"]: row for row in rows(url, "key")}
    assert (by_key[key_id]["name"], by_key[key_id]["requests"]) == ("one", 2)
    assert by_key[""]["requests"] == 1
    assert [row["day"] for row in rows(url, "day")] == ["2027-01-15", "2027-01-16"]
    assert {row["owner"] for row in rows(url, "owner")} == {"", "me"}


def test_sums_by_two(url: str) -> None:
    """Each agrees with the sums by either of the two, and rows are in their order."""
    asyncio.run(fill(url))
    single = tables(url, SUMS)
    for pair, both in tables(url, combinations(SUMS, 2)).items():
        assert isinstance(pair, tuple)
        one, two = pair
        assert all(tuple(row) == columns_of((one, two)) for row in both)
        assert [row[one] for row in both] == sorted(row[one] for row in both)
        pairs = [(by, row) for by in (one, two) for row in single[by]]
        for name, row in pairs:
            parts = [part for part in both if part[name] == row[name]]
            for what in ("prompt_tokens", "completion_tokens", "cost_usd"):
                assert sum(part[what] for part in parts) == pytest.approx(row[what])
    assert len(rows(url, ("day", "provider"))) == 3
    moved = [row for row in rows(url, ("key", "node")) if row["node"] in ("n1", "n2")]
    assert [(row["requests"], row["completion_tokens"]) for row in moved] == [(1, 30), (1, 70)]


def test_of_one_owner(url: str) -> None:
    key_id = asyncio.run(fill(url))
    mine = UsagePeriod(owner="me")
    assert [row["key"] for row in rows(url, "key", mine)] == [key_id]
    assert sum(row["completion_tokens"] for row in rows(url, "node", mine)) == 102
    assert rows(url, "key", UsagePeriod(owner="you")) == []


def test_spans(url: str) -> None:
    key_id = asyncio.run(fill(url))
    later = UsagePeriod(since_s=START_S + 10)
    assert [row["model"] for row in rows(url, "operation", later)] == ["x", "m"]
    assert len(rows(url, "attempt", UsagePeriod(until_s=START_S + 10))) == 2
    assert len(rows(url, "operation", UsagePeriod(key_id=key_id))) == 2


def test_lists_have_their_columns(url: str) -> None:
    asyncio.run(fill(url))
    for by, found in tables(url, LISTS).items():
        assert found
        assert all(tuple(row) == columns_of(by) for row in found)


def test_files_hold_what_is_shown(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    asyncio.run(fill(url))
    for by in ("provider", *LISTS):
        target = tmp_path / f"{by}.parquet"
        assert run(["usage", "--by", by, "--db", url, "--parquet", str(target)]) == 0
        assert run(["usage", "--by", by, "--db", url, "--csv", str(tmp_path / by)]) == 0
        capsys.readouterr()
        assert run(["usage", "--by", by, "--db", url, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert pq.read_table(target).to_pylist() == shown
        with (tmp_path / by).open(newline="") as stream:
            read = list(csv.DictReader(stream))
        assert [row["cost_usd"] for row in read] == [str(row["cost_usd"]) for row in shown]
        assert run(["usage", "--by", by, "--db", url]) == 0
        drawn = capsys.readouterr().out
        assert "cost usd" in drawn
        if by in LISTS:
            # People read a time of day, and figures without nine decimals.
            assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", drawn)
            assert not re.search(r"\d\.\d{7}", drawn)
    assert not list(tmp_path.glob(".*.tmp"))


def test_commands_make_show_and_revoke_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = ["--db", str(tmp_path / "x.db")]
    command = ["keys", "create", "lab", "--owner", "me", "--model", "llama-*", "--expires", "30d"]
    command += ["--tokens-per-day", "1M", "--provider", "ethz", "--no-track", *db]
    assert run(command) == 0
    made = capsys.readouterr()
    text = made.out.strip()
    assert text.startswith("atoll-")
    assert "\n" not in text
    assert text not in made.err
    assert run(["keys", "list", "--json", *db]) == 0
    (key,) = json.loads(capsys.readouterr().out)
    assert key["id"] == text.split("-")[1]
    assert key["tokens_per_day"] == 1_000_000
    assert key["track"] is False
    assert key["policy"]["providers"] == ["ethz"]
    assert run(["keys", "show", "lab", "--json", *db]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tokens_used"] == {"today": 0, "this_month": 0, "total": 0}
    assert text.split("-")[2] not in json.dumps(shown)
    for shows in (["keys", "list"], ["keys", "show", "lab"]):
        assert run([*shows, *db]) == 0
        drawn = capsys.readouterr().out
        assert "providers ethz" in drawn
        assert f"{datetime.fromtimestamp(key['expires_s'], UTC):%Y-%m-%d}" in drawn
    assert run(["keys", "revoke", "lab", *db]) == 0
    assert run(["keys", "list", "--json", *db]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(["keys", "list", "--all", *db]) == 0
    assert "revoked" in capsys.readouterr().out
    assert run(["keys", "create", "other", "--json", *db]) == 0
    made_json = json.loads(capsys.readouterr().out)
    assert made_json["key"].startswith("atoll-")
    assert made_json["role"] == "member"
    assert run(["keys", "create", "guest", "--role", "viewer", *db]) == 0
    capsys.readouterr()
    for shows in (["keys", "list"], ["keys", "show", "guest"]):
        assert run([*shows, *db]) == 0
        assert "viewer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["keys", "create", "x", "--expires", "soon"], "--expires"),
        (["keys", "create", "x", "--role", "root"], "role"),
        (["keys", "create", "x", "--tokens-per-day", "many"], "--tokens-per-day"),
        (["keys", "create", "x", "--min-precision", "good"], "min-precision"),
        (["keys", "create", "x", "--stability", "rock"], "stability"),
        (["keys", "show", "nobody"], "nobody"),
        (["keys", "revoke", "nobody"], "nobody"),
        (["usage", "--by", "colour"], "colour"),
        (["usage", "--since", "then"], "--since"),
        (["usage", "--csv", "/no/such/folder/x"], "no such folder"),
        (["usage", "--json", "--csv", "-"], "exclude"),
    ],
)
def test_mistakes_are_one_line(
    command: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--db", str(tmp_path / "x.db")]) not in (0, 70)
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error
