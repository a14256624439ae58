"""Keys over HTTP: made, shown once, limited, revoked; each by whom it may."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.accounts.api_keys import NewKey
from tests.runtime.accounts.helpers import sqlite_url
from tests.runtime.gateway.console.site import ADA, Site, open_site
from tests.runtime.gateway.engine import ScriptedEngine
from tests.runtime.gateway.harness import CHAT, chat, running


async def listed(site: Site, way: str, more: str = "") -> dict[str, dict[str, Any]]:
    reply = await site.ask(way, "GET", "keys", None, more)
    assert reply.status == 200, reply.body
    return {key["name"]: key for key in reply.json["keys"]}


async def test_a_key_is_made_used_changed_and_revoked(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        made = await site.ask(
            "admin", "POST", "keys", {"name": "new", "owner": "bo", "tokens_per_day": 1000}
        )
        assert made.status == 201
        assert made.headers["cache-control"] == "no-store"
        shown = made.json
        site.texts["new"] = shown.pop("key")
        key_id = shown["id"]
        assert site.texts["new"].startswith(f"atoll-{key_id}-")
        assert (shown["name"], shown["owner"], shown["role"]) == ("new", "bo", "member")
        assert (shown["state"], shown["tokens_per_day"], shown["own"]) == ("active", 1000, False)
        # It works at once, here.
        assert (await site.place.ask(site.texts["new"])).status == 200
        await site.place.bench.settled()
        await site.place.accounts.sync()
        used = (await listed(site, "viewer"))["new"]["used"]
        assert used["today"] == used["month"] == used["total"]
        assert used["total"]["tokens"] > 0

        changes = {"models": ["other"], "name": "n2", "tokens_per_day": None, "role": "viewer"}
        changed = await site.ask("admin", "PATCH", f"keys/{key_id}", changes)
        assert changed.status == 200
        assert {name: changed.json[name] for name in changes} == changes
        assert (changed.json["owner"], changed.json["used"]) == ("bo", used)
        assert (await site.place.ask(site.texts["new"])).json["error"]["code"] == "role_forbids"
        await site.ask("admin", "PATCH", f"keys/{key_id}", {"role": "member"})
        refused = await site.place.ask(site.texts["new"])
        assert refused.json["error"]["code"] == "model_not_allowed"
        await site.ask("admin", "PATCH", f"keys/{key_id}", {"models": []})
        assert (await site.place.ask(site.texts["new"])).status == 200

        revoked = await site.ask("admin", "DELETE", f"keys/{key_id}")
        assert (revoked.status, revoked.json["state"]) == (200, "revoked")
        refused = await site.place.ask(site.texts["new"])
        assert (refused.status, refused.json["error"]["code"]) == (401, "invalid_api_key")
        reply = await site.ask("new", "GET", "me")
        assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
        again = await site.ask("admin", "DELETE", f"keys/{key_id}")
        assert again.json["revoked_s"] == revoked.json["revoked_s"]
        late = await site.ask("admin", "PATCH", f"keys/{key_id}", {"name": "back"})
        assert late.status == 400


async def test_another_gateway_learns_of_a_change(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        url = sqlite_url(tmp_path)
        other = await Accounts.open(url, journal=tmp_path / "other", refresh_s=60.0)
        try:
            bearer = f"Bearer {site.texts['member']}".encode()
            assert other.admit(bearer, "m").key_id == site.ids["member"]
            path = f"keys/{site.ids['member']}"
            await site.ask("admin", "PATCH", path, {"role": "viewer", "owner": "bo"})
            await other.sync()
            found = other.identify(bearer)
            assert found is not None
            assert (found.spec.role, found.spec.owner) == ("viewer", "bo")
        finally:
            await other.close()


async def test_changes_at_the_same_time_all_count(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        path = f"keys/{site.ids['other']}"
        fields = {"name": "n", "owner": "o", "concurrent": 3, "requests_per_min": 7, "track": False}
        replies = await asyncio.gather(
            *(site.ask("admin", "PATCH", path, {name: value}) for name, value in fields.items())
        )
        assert [reply.status for reply in replies] == [200] * 5
        key = (await listed(site, "admin"))["n"]
        assert {name: key[name] for name in fields} == fields


async def test_members_see_and_revoke_their_own(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        await site.add("second", owner=ADA)
        await site.add("another")
        mine = await listed(site, "member")
        assert set(mine) == {"member", "second"}
        assert all(key["own"] for key in mine.values())
        assert set(await listed(site, "other")) == {"other"}
        # An admin speaks for ada, and for somebody without keys.
        lowered = f"x-atoll-role: member\r\nx-atoll-owner: {ADA}\r\n"
        assert set(await listed(site, "socket", lowered)) == {"member", "second"}
        assert await listed(site, "token", "x-atoll-role: member\r\n") == {}
        everything = {"admin", "member", "other", "viewer", "second", "another"}
        assert set(await listed(site, "viewer")) == everything
        assert {n for n, k in (await listed(site, "viewer")).items() if k["own"]} == {"viewer"}
        assert set(await listed(site, "admin")) == everything

        for name in ("other", "admin", "nothing"):
            key_id = site.ids.get(name, "aaaaaaaaaaaa")
            reply = await site.ask("member", "DELETE", f"keys/{key_id}")
            assert (reply.status, reply.json["error"]["code"]) == (403, "role_forbids"), name
        assert (await site.ask("member", "DELETE", f"keys/{site.ids['second']}")).status == 200
        assert (await site.ask("second", "GET", "me")).status == 401
        assert (await site.ask("member", "PATCH", f"keys/{site.ids['member']}", {})).status == 403
        reply = await site.ask("socket", "DELETE", f"keys/{site.ids['member']}", None, lowered)
        assert reply.status == 200
        assert (await site.ask("member", "GET", "me")).status == 401
        assert (await site.ask("other", "DELETE", f"keys/{site.ids['other']}")).status == 200


async def test_no_answer_but_the_first_has_a_secret(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        reply = await site.ask("admin", "POST", "keys", {"name": "k"})
        site.texts["k"] = reply.json["key"]
        digests = [key.digest for key in await site.place.database.keys()]
        secrets = [text.split("-")[2] for text in site.texts.values()]
        replies = [
            await site.ask("admin", "GET", "keys"),
            await site.ask("viewer", "GET", "keys"),
            await site.ask("admin", "PATCH", f"keys/{reply.json['id']}", {"name": "l"}),
            await site.ask("admin", "DELETE", f"keys/{reply.json['id']}"),
            await site.ask("admin", "GET", "usage?by=key"),
        ]
        said = b"".join(r.body for r in replies) + site.place.log.read_bytes()
        for hidden in (*digests, *secrets):
            assert hidden.encode() not in said
        assert b"digest" not in said
        assert digests[0].encode() not in reply.body


NONSENSE: list[tuple[object, str | None]] = [
    (b"", None),
    (b"[]", None),
    (b"{", None),
    (b'{"name":"\\ud800"}', None),
    ({"name": None}, "name"),
    ({"name": "x", "expires_s": 1.0}, "expires_s"),
    ({"name": "x", "expires_s": 1e300}, "expires_s"),
    ({"name": "x", "digest": "0"}, "digest"),
    ({"name": "x", "id": "mine"}, "id"),
    ({"name": "x", "revoked_s": None}, "revoked_s"),
    ({"name": "x", "policy": {"nothing": 1}}, "policy.nothing"),
    (b"[" * 60_000, None),
    (b'{"name": "x", "models": ["' + b"x" * 70_000 + b'"]}', None),
]


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        for body, param in NONSENSE:
            for method, path in (("POST", "keys"), ("PATCH", f"keys/{site.ids['other']}")):
                reply = await site.ask("admin", method, path, body)
                assert reply.status in (400, 413), (method, body, reply.body)
                assert reply.json["error"]["param"] == param, (method, body)
        assert (await listed(site, "admin"))["other"]["role"] == "member"
        assert len(await site.place.database.keys()) == 4


async def test_keys_that_are_not_there(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        assert (await site.ask("admin", "POST", "keys", {})).json["error"]["param"] == "name"
        # A name is no id, and neither is what only begins like one.
        for path in ("keys/other", f"keys/{site.ids['other'][:5]}", f"keys/{site.ids['other']}/"):
            for method, body in (("PATCH", {"name": "x"}), ("DELETE", None)):
                reply = await site.ask("admin", method, path, body)
                assert (reply.status, reply.json["error"]["code"]) == (404, "not_found"), path
        assert (await site.ask("admin", "PATCH", f"keys/{site.ids['other']}", {})).status == 400
        assert (await site.ask("admin", "GET", "keys?all=1")).status == 400
        assert len(await listed(site, "admin")) == 4


async def test_an_expiry_moves(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        path = f"keys/{site.ids['other']}"
        soon_s = time.time() + 3600
        reply = await site.ask("admin", "PATCH", path, {"expires_s": soon_s})
        assert reply.json["expires_s"] == soon_s
        # Other fields of a key that has expired may change; it stays so.
        spec = NewKey(name="old", expires_s=time.time() + 0.05)
        _, key = await site.place.database.create_key(spec)
        await asyncio.sleep(0.06)
        reply = await site.ask("admin", "PATCH", f"keys/{key.id}", {"name": "older"})
        assert (reply.json["name"], reply.json["state"]) == ("older", "expired")
        reply = await site.ask("admin", "PATCH", f"keys/{key.id}", {"expires_s": None})
        assert reply.json["state"] == "active"


async def test_who_changed_what_is_in_the_log(tmp_path: Path) -> None:
    async with open_site(tmp_path) as site:
        made = (await site.ask("admin", "POST", "keys", {"name": "k"})).json
        await site.ask("socket", "PATCH", f"keys/{made['id']}", {"name": "l", "owner": ADA})
        await site.ask("member", "DELETE", f"keys/{made['id']}")
        site.place.bench.gateway.log.flush()
        lines = [line for line in site.place.log.read_text().splitlines() if '"key.' in line]
        assert len(lines) == 3
        for line, event, by in zip(
            lines,
            ("key.made", "key.changed", "key.revoked"),
            (site.ids["admin"], "admin", site.ids["member"]),
            strict=True,
        ):
            assert event in line
            assert f'"by":"{by}"' in line
            assert made["id"] in line


async def test_a_database_that_is_away_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(tmp_path) as site:

        async def away(*_: object) -> None:
            raise OSError("connection refused at db.internal:5432")

        database = site.place.accounts.database
        for name in ("create_key", "change_key", "revoke_key", "counters"):
            monkeypatch.setattr(database, name, away)
        for method, path, body in (
            ("POST", "keys", {"name": "x"}),
            ("PATCH", f"keys/{site.ids['other']}", {"name": "x"}),
            ("DELETE", f"keys/{site.ids['other']}", None),
            ("GET", "keys", None),
        ):
            reply = await site.ask("admin", method, path, body)
            error = reply.json["error"]
            assert (reply.status, error["code"]) == (503, "database_away"), (method, path)
            assert "internal" not in error["message"]
            assert reply.headers["retry-after"] == "5"
        # Models are asked all the same.
        assert (await site.place.ask(site.texts["member"])).status == 200


async def test_without_accounts_there_are_no_keys() -> None:
    async with running([ScriptedEngine()]) as bench:
        for method, path, body in (
            ("GET", "keys", None),
            ("POST", "keys", {"name": "x"}),
            ("PATCH", "keys/a", {"name": "x"}),
            ("DELETE", "keys/a", None),
            ("GET", "usage", None),
        ):
            reply = await bench.admin(f"/atoll/v1/{path}", body, method=method)
            assert (reply.status, reply.json["error"]["code"]) == (404, "no_accounts")
        me = (await bench.admin("/atoll/v1/me")).json
        assert (me["accounts"], me["keys_needed"]) == (False, False)
        assert (await bench.get("/atoll/v1/me")).status == 403
        assert (await bench.post(CHAT, chat())).status == 200
