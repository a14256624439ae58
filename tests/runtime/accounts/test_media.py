"""Sound and pictures in the journal, the ledger, the quotas and the reports."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from atoll.cli.main import run as run_cli
from atoll.core.errors import InputError
from atoll.runtime.accounts import schema
from atoll.runtime.accounts.accounts import media_counts
from atoll.runtime.accounts.api_keys import NewKey
from atoll.runtime.accounts.database import Database
from atoll.runtime.accounts.journal import FinishedRequest, UsageJournal, read_segment
from atoll.runtime.accounts.key_limits import Counted
from atoll.runtime.accounts.ledger import rows_of
from atoll.runtime.accounts.slots import NO_MEDIA, MediaCounts, make_slots, read_slots
from atoll.runtime.openai import Usage
from tests.runtime.accounts.helpers import record
from tests.runtime.accounts.test_gateway import place
from tests.runtime.gateway.engine import Fault
from tests.runtime.gateway.graph_server import ScriptedGraphServer
from tests.runtime.gateway.test_form import FILE, TYPE, form

SPEECH = {"model": "m", "input": "hello", "voice": "v", "response_format": "pcm"}
FORM = f"content-type: {TYPE.decode()}\r\n"


def old_slots(requests: list[tuple[bytes, int]], media: tuple[int, ...] = ()) -> bytes:
    """A file as an older version of the journal left it: the first had no words for sound and pictures."""
    count = len(requests)
    data = (b"ATOLLJ02" if media else b"ATOLLJ01") + struct.pack("<Q", count)
    data += b"".join(struct.pack("<Q", tokens) for _, tokens in requests)
    data += struct.pack(f"<{len(media)}Q", *media) * count
    for request, _ in requests:
        word = len(request) | zlib.crc32(request) << 32
        data += (struct.pack("<Q", word) + request).ljust(512, b"\0")
    return data


def test_slots_of_the_first_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    path.write_bytes(old_slots([(b"one", 5), (b"two", 2**40)]))
    assert list(read_slots(path)) == [(b"one", 5, NO_MEDIA), (b"two", 2**40, NO_MEDIA)]


def test_slots_of_the_second_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    path.write_bytes(old_slots([(b"one", 5), (b"two", 6)], (1, 2, 3)))
    media = MediaCounts(1, 2, 3)
    assert list(read_slots(path)) == [(b"one", 5, media), (b"two", 6, media)]


def test_a_journal_of_the_first_version_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    opened = ["op-run", "k", True, "r-1", "m", "/v1/completions", 5.0]
    (folder / "slots").write_bytes(old_slots([(msgspec.msgpack.encode(opened), 12)]))
    done = ["op-done", "k", 15, 9.0, list(record("r-2"))[:15]]
    data = msgspec.msgpack.encode(done)
    (folder / "a-00000001.done").write_bytes(struct.pack("<II", len(data), zlib.crc32(data)) + data)
    journal = UsageJournal.claim(tmp_path, slots=4)
    assert (journal.recovered.finished, journal.recovered.crashed) == (1, 1)
    found = {d.op: d for path in journal.segments() for d in read_segment(path)}
    assert found["op-run"].tokens == 12
    assert found["op-done"].record == record("r-2")
    assert all((d.audio_ms, d.speech_ms, d.pixels) == (0, 0, 0) for d in found.values())
    journal.release()


def test_a_journal_of_a_later_version_is_refused_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    slots = folder / "slots"
    slots.write_bytes(b"ATOLLJ99" + bytes(100))
    with pytest.raises(InputError, match="another version") as refused:
        UsageJournal.claim(tmp_path, slots=4)
    assert "\n" not in refused.value.message
    assert slots.read_bytes() == b"ATOLLJ99" + bytes(100)


def test_a_slot_that_is_used_again_forgets_the_sound_before(tmp_path: Path) -> None:
    path = tmp_path / "slots"
    slots = make_slots(path, 2)
    slots.put(1, b"one")
    slots.use_media(1, MediaCounts(1, 2, 3))
    assert slots.media(1) == MediaCounts(1, 2, 3)
    assert [s.media for s in read_slots(path)] == [MediaCounts(1, 2, 3)]
    slots.clear(1)
    slots.put(1, b"two")
    assert slots.media(1) == NO_MEDIA
    assert [s.media for s in read_slots(path)] == [NO_MEDIA]
    slots.close()


def test_nonsense_is_cut() -> None:
    assert media_counts(Usage(0, 0, 0, math.nan, math.inf, 2**70)) == MediaCounts(0, 10**9, 2**40)
    assert media_counts(Usage(0, 0, 0, -5.0, 1e300, -1)) == MediaCounts(0, 10**9, 0)
    assert media_counts(Usage(0, 0, 0, 0.0004, 0.0006, 1)) == MediaCounts(0, 1, 1)


def test_a_database_of_the_version_before_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def make() -> None:
        database = await Database.open(str(path))
        await database.write("s", rows_of([FinishedRequest("o", "k", 15, 0.0, record())]))
        await database.close()

    asyncio.run(make())
    with sqlite3.connect(path) as connection:
        for table, names in (
            ("operations", ("audio_ms", "speech_ms", "image_pixels", "bytes_in", "bytes_out")),
            ("attempts", ("audio_ms", "speech_ms", "image_pixels")),
            ("token_counters", ("audio_ms", "pixels")),
        ):
            for name in names:
                connection.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
        for table in ("gateways", "rate_buckets", "rate_leases", "ledger_gaps", "budgets"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    connection.close()

    async def look() -> None:
        database = await Database.open(str(path))
        more = FinishedRequest("p", "k", 1, 0.0, record(), 1000, 500, 7)
        await database.write("t", rows_of([more]))
        async with database.reading() as connection:
            rows = (
                await connection.execute(
                    sa.select(schema.operations).order_by(schema.operations.c.id)
                )
            ).all()
        assert [(row.audio_ms, row.image_pixels) for row in rows] == [(0, 0), (1000, 7)]
        used = await database.counters(["k"], ["total"])
        assert used == {"k": {"total": Counted(16, 1500, 7)}}
        await database.close()

    asyncio.run(look())


async def test_what_graph_servers_did_is_in_the_ledger_once_even_after_failover(
    tmp_path: Path,
) -> None:
    async with place(tmp_path, ScriptedGraphServer(), ScriptedGraphServer()) as it:
        key = await it.key(tokens_total=10**9)
        header = f"authorization: Bearer {key}\r\n"
        it.bench.engines[0].faults += [Fault("503"), Fault("die_before_head"), Fault("die_after")]
        for _ in range(4):
            assert (await it.bench.post("/v1/audio/speech", SPEECH, header)).status == 200
        heard = form(('name="model"', b"m"), FILE)
        assert (await it.bench.post("/v1/audio/transcriptions", heard, header + FORM)).status == 200
        drawing = {"model": "m", "prompt": "sea"}
        assert (await it.bench.post("/v1/images/generations", drawing, header)).status == 200
        rows = await it.rows(schema.operations)
        assert sorted((r.audio_ms, r.speech_ms, r.image_pixels) for r in rows) == [
            (0, 0, 128 * 128),
            *[(0, 1000, 0)] * 4,
            (2500, 0, 0),
        ]
        attempts = await it.rows(schema.attempts)
        assert len(attempts) > len(rows)
        assert sum(a.speech_ms for a in attempts) == 4000
        (total,) = [c for c in await it.rows(schema.counters) if c.period == "total"]
        assert (total.audio_ms, total.pixels) == (6500, 128 * 128)


async def test_sound_and_pictures_have_quotas(tmp_path: Path) -> None:
    async with place(tmp_path, ScriptedGraphServer()) as it:
        key = await it.key(audio_seconds_total=2)
        header = f"authorization: Bearer {key}\r\n"
        for _ in range(2):
            assert (await it.bench.post("/v1/audio/speech", SPEECH, header)).status == 200
        await it.bench.settled()
        reply = await it.bench.post("/v1/audio/speech", SPEECH, header)
        assert (reply.status, reply.json["error"]["code"]) == (429, "insufficient_quota")
        assert "2 seconds of sound in all" in reply.json["error"]["message"]
        await it.accounts.sync()
        await it.accounts.sync()
        assert (await it.bench.post("/v1/audio/speech", SPEECH, header)).status == 429
        other = f"authorization: Bearer {await it.key(pixels_per_day=10)}\r\n"
        drawing = {"model": "m", "prompt": "sea"}
        assert (await it.bench.post("/v1/images/generations", drawing, other)).status == 200
        await it.bench.settled()
        reply = await it.bench.post("/v1/images/generations", drawing, other)
        assert (reply.status, int(reply.headers["retry-after"]) > 0) == (429, True)


async def test_a_gateway_that_dies_has_written_down_what_was_heard(tmp_path: Path) -> None:
    async with place(tmp_path, ScriptedGraphServer(step_s=0.05)) as it:
        key = await it.key(tokens_total=10**9)
        raw = json.dumps(SPEECH).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", it.bench.port)
        head = f"POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(3 * 4800)
        (relay,) = it.bench.gateway.relays
        # As it stands in the file at this moment, which is all that a death leaves.
        (slot,) = read_slots(tmp_path / "journal" / "0" / "slots")
        assert slot.media.speech_ms >= 200
        assert slot.media.speech_ms % 100 == 0
        assert relay.slot is not None
        writer.close()


def test_reports_show_sound_and_pictures_where_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    url = str(tmp_path / "x.db")

    async def fill(number: int, *media: int) -> str:
        database = await Database.open(url)
        _, key = await database.create_key(NewKey(name=f"key{number}", pixels_total=1000))
        done = FinishedRequest(f"o{number}", key.id, 15, 1_800_000_000.0, record(), *media)
        await database.write(f"s{number}", rows_of([done]))
        await database.close()
        return key.id

    def say(*arguments: str) -> str:
        capsys.readouterr()
        assert run_cli([*arguments, "--db", url]) == 0
        return capsys.readouterr().out

    asyncio.run(fill(1))
    plain = say("usage")
    assert "audio" not in plain
    assert "pixels" not in plain
    key_id = asyncio.run(fill(2, 1500, 0, 12))
    for by in ("key", "operation", "provider"):
        shown = say("usage", "--by", by)
        assert "audio seconds" in shown
        assert "1.500" in shown
        assert "image pixels" in shown
        assert "speech" not in shown
    rows = json.loads(say("usage", "--json"))
    assert {row["key"]: row["audio_seconds"] for row in rows}[key_id] == 1.5
    key = json.loads(say("keys", "show", key_id, "--json"))
    assert key["audio_seconds_used"]["total"] == 1.5
    assert key["pixels_used"]["total"] == 12
    assert key["pixels_total"] == 1000
    assert "1k pixels" in say("keys", "list")
    made = json.loads(say("keys", "create", "x", "--audio-seconds-per-day", "90", "--json"))
    assert made["audio_seconds_per_day"] == 90
