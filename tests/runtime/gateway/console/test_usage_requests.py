"""Usage over HTTP: sums of one's own or of all, as JSON and CSV."""

from __future__ import annotations

import csv
import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.accounts.journal import FinishedRequest
from atoll.runtime.accounts.ledger import rows_of
from atoll.runtime.accounts.usage_report import SUMS
from atoll.runtime.gateway.console import usage_requests as console_usage
from atoll.telemetry.usage_record import Attempt
from tests.runtime.accounts.helpers import record
from tests.runtime.gateway.console.site import ADA, Site, open_site

START_S = 1_800_000_000.0
DAY_S = 86_400.0
COUNTED = ("prompt_tokens", "completion_tokens", "cost_usd", "audio_seconds", "image_pixels")


async def fill(site: Site) -> None:
    """Write requests of several keys, days and models into the ledger; some moved."""
    await site.add("second", owner=ADA)
    keys = [site.ids[name] for name in ("member", "second", "other")]
    done = []
    for number, (key, model, day) in enumerate(
        itertools.product([*keys, None], ("m", "=cmd|' /C calc'!A0"), range(3))
    ):
        at_s = START_S + day * DAY_S
        moved = (
            Attempt("b1", "n1", "ethz", number, 0.1, "failed", 1.0, 2.0),
            Attempt("b2", "n2", "epfl", 7, 0.2, "ok", 3.0, 4.0),
        )
        kept = record(
            model=model,
            prompt=10 + number,
            completion=number + 7,
            attempts=moved[number % 2 :],
            started_s=at_s,
            outcome="ok" if number % 3 else "error",
        )
        done.append(FinishedRequest(f"o{number}", key, 0, at_s, kept))
    await site.place.database.write("s", rows_of(done))


async def rows(site: Site, way: str, query: str, more: str = "") -> list[dict[str, Any]]:
    reply = await site.ask(way, "GET", f"usage?{query}", None, more)
    assert reply.status == 200, reply.body
    found: list[dict[str, Any]] = reply.json["rows"]
    assert reply.json["truncated"] is False
    return found


async def test_sums_by_two_agree_with_sums_by_one(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        single = {by: await rows(site, "viewer", f"by={by}") for by in SUMS}
        for one, two in (("key", "day"), ("model", "provider")):
            both = await rows(site, "viewer", f"by={one},{two}")
            assert len({(row[one], row[two]) for row in both}) == len(both)
            for by in (one, two):
                for row in single[by]:
                    parts = [r for r in both if r[by] == row[by]]
                    for what in COUNTED:
                        total = sum(part[what] for part in parts)
                        assert total == pytest.approx(row[what]), (one, two, what)
                    if not {one, two} & {"provider", "node"}:
                        # A request that moved is one in each place.
                        assert sum(part["requests"] for part in parts) == row["requests"]
        escaped = await rows(site, "viewer", "by=day%2Cmodel")
        assert escaped[0]["day"] == "2027-01-15"
        assert (await site.ask("viewer", "GET", "usage?by=day,model")).json["by"] == [
            "day",
            "model",
        ]


async def test_members_see_what_their_own_keys_used(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        ids = site.ids
        for by in ("key", "key,day", "key,node"):
            mine = await rows(site, "member", f"by={by}")
            assert {row["key"] for row in mine} == {ids["member"], ids["second"]}
            only = await rows(site, "other", f"by={by}")
            assert {row["key"] for row in only} == {ids["other"]}
        lowered = f"x-atoll-role: member\r\nx-atoll-owner: {ADA}\r\n"
        assert await rows(site, "socket", "by=key", lowered) == await rows(site, "member", "by=key")
        assert await rows(site, "token", "by=day", "x-atoll-role: member\r\n") == []
        assert {row["key"] for row in await rows(site, "viewer", "by=key")} == {
            "",
            *(ids[name] for name in ("member", "second", "other")),
        }
        by_key = await rows(site, "member", f"by=key&key={ids['second']}")
        assert [row["key"] for row in by_key] == [ids["second"]]
        for key in (ids["other"], "aaaaaaaaaaaa", "", "member"):
            reply = await site.ask("member", "GET", f"usage?key={key}")
            assert (reply.status, reply.json["error"]["code"]) == (403, "role_forbids"), key
        assert (await site.ask("viewer", "GET", "usage?key=aaaaaaaaaaaa")).status == 404


async def test_a_span(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        since = f"by=day&since_s={START_S + 10}"
        assert [row["day"] for row in await rows(site, "admin", since)] == [
            "2027-01-16",
            "2027-01-17",
        ]
        both = f"{since}&until_s={START_S + 1.5 * DAY_S}"
        assert [row["day"] for row in await rows(site, "admin", both)] == ["2027-01-16"]
        assert len(await rows(site, "admin", "by=day")) == 3


NONSENSE = [
    ("by=", "by"),
    ("by=nothing", "by"),
    ("by=day,day", "by"),
    ("by=day,model,key", "by"),
    ("by=operation", "by"),
    ("by=day,", "by"),
    ("since_s=yesterday", "since_s"),
    ("since_s=nan", "since_s"),
    ("until_s=inf", "until_s"),
    ("since_s=", "since_s"),
    ("until_s=-1", "until_s"),
    ("until_s=1e300", "until_s"),
    ("format=xml", "format"),
    ("limit=5", "limit"),
    ("by=day&by=model", None),
    ("by=%ff", None),
    ("&".join(f"a{n}=1" for n in range(100)), None),
]


async def test_queries_that_mean_nothing(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        for query, param in NONSENSE:
            reply = await site.ask("admin", "GET", f"usage?{query}")
            assert (reply.status, reply.json["error"]["param"]) == (400, param), query


async def test_a_file(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        reply = await site.ask("member", "GET", "usage?by=day,model&format=csv")
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/csv; charset=utf-8"
        assert reply.headers["content-disposition"] == 'attachment; filename="usage-day-model.csv"'
        read = list(csv.DictReader(io.StringIO(reply.body.decode(), newline="")))
        shown = await rows(site, "member", "by=day,model")
        assert len(read) == len(shown)
        for line, row in zip(read, shown, strict=True):
            # A spreadsheet shows the text, and does not run it.
            model = row["model"] if row["model"] == "m" else f"'{row['model']}"
            expected = row | {"model": model}
            assert line == {name: str(value) for name, value in expected.items()}
        empty = await site.ask("token", "GET", "usage?format=csv", None, "x-atoll-role: member\r\n")
        assert empty.body.decode().splitlines()[0].startswith("key,name,requests,prompt_tokens")
        assert len(empty.body.splitlines()) == 1


async def test_names_of_keys_run_nothing_in_a_spreadsheet(tmp_path: Path) -> None:
    names = ("=1+1", "+1", "-1", "@x", " =1", "'=1", "a=1", "|x", 'a","=1')
    async with open_site(tmp_path) as site:
        done = []
        for number, name in enumerate(names):
            key_id = await site.add(name, owner=name)
            at_s = START_S
            done.append(FinishedRequest(f"o{number}", key_id, 0, at_s, record(started_s=at_s)))
        await site.place.database.write("s", rows_of(done))
        reply = await site.ask("viewer", "GET", "usage?by=key,owner&format=csv")
        read = list(csv.DictReader(io.StringIO(reply.body.decode(), newline="")))
        assert len(read) == len(names)
        for line in read:
            for cell in (line["name"], line["owner"]):
                assert cell.removeprefix("'") in names or cell in names
                assert cell.lstrip()[0] not in "=+-@|", cell


async def test_there_is_a_max_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)
        monkeypatch.setattr(console_usage, "ROWS", 2)
        reply = await site.ask("admin", "GET", "usage?by=day")
        assert (len(reply.json["rows"]), reply.json["truncated"]) == (2, True)
        monkeypatch.setattr(console_usage, "ROWS", 3)
        assert len(await rows(site, "admin", "by=day")) == 3
        # A file that lacks rows would be taken for whole.
        monkeypatch.setattr(console_usage, "CSV_ROWS", 2)
        assert (await site.ask("admin", "GET", "usage?by=day&format=csv")).status == 400
        monkeypatch.setattr(console_usage, "CSV_ROWS", 3)
        assert (await site.ask("admin", "GET", "usage?by=day&format=csv")).status == 200


async def test_a_budget_is_set_seen_by_whom_it_concerns_and_removed(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await fill(site)

        async def seen(who: str) -> list[tuple[str | None, float]]:
            reply = await site.ask(who, "GET", "budgets")
            return [(one["owner"], one["usd_per_month"]) for one in reply.json["budgets"]]

        asked = {"owner": ADA, "usd_per_month": 50}
        assert (await site.ask("member", "PUT", "budgets", asked)).status == 403
        reply = await site.ask("admin", "PUT", "budgets", asked)
        assert reply.status == 200, reply.body
        (shown,) = reply.json["budgets"]
        assert (shown["warn_at"], shown["in_settings"]) == (0.8, False)
        assert await seen("member") == await seen("viewer") == [(ADA, 50.0)]
        assert await seen("other") == []
        await site.ask("admin", "PUT", "budgets", asked | {"usd_per_month": 60})
        # Kept with the keys: another look, as at another gateway, finds it.
        await site.place.bench.gateway.budgets.look(START_S)
        assert await seen("member") == [(ADA, 60.0)]
        standing = site.place.bench.gateway.budgets.standings[0]
        assert standing.spent_usd > 0.0
        for wrong, status in (
            ({"key": "nobody", "usd_per_month": 5}, 404),
            ({"key": site.ids["other"], "owner": ADA, "usd_per_month": 5}, 400),
            ({"usd_per_month": 0}, 400),
            ([], 400),
        ):
            assert (await site.ask("admin", "PUT", "budgets", wrong)).status == status
        gone = await site.ask("admin", "DELETE", "budgets/owner%20ada%40lab.example")
        assert (gone.status, gone.json) == (200, {"budgets": []})
        again = await site.ask("admin", "DELETE", "budgets/owner%20ada%40lab.example")
        assert again.status == 404
