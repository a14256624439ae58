from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.fabric.registry import records
from atoll.fabric.registry.records import (
    Gpu,
    Hardware,
    Metadata,
    NodeService,
    Record,
    SessionState,
    merge,
)
from tests.fabric.registry.network import metadata

SID = "m001-0123456789abcdef"

# Few values of each field, so that ties in every prefix of the order are common.
rivals = st.builds(
    Record,
    sid=st.just(SID),
    state=st.sampled_from(SessionState),
    rev=st.integers(0, 2),
    signed_s=st.sampled_from((1.0, 2.0)),
    body=st.sampled_from((b"", b"a", b"b")),
    certificate=st.sampled_from((b"", b"h0")),
    signature=st.sampled_from((b"", b"x", b"y")),
)


@given(rivals, rivals, rivals)
def test_merge_is_a_join_semilattice(a: Record, b: Record, c: Record) -> None:
    assert merge(a, b) == merge(b, a)
    assert merge(merge(a, b), c) == merge(a, merge(b, c))
    assert merge(a, a) == a
    assert merge(a, merge(a, b)) == merge(a, b)


@given(rivals, rivals)
def test_merge_returns_one_of_the_two_and_never_goes_back(a: Record, b: Record) -> None:
    merged = merge(a, b)
    assert merged in (a, b)
    assert merged.state == max(a.state, b.state)
    if a.state == b.state:
        assert merged.rev == max(a.rev, b.rev)
    if a.rank == b.rank:
        assert a == b


@given(st.lists(rivals, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(history: list[Record], rng: object) -> None:
    def result(order: list[Record]) -> Record:
        held = order[0]
        for record in order[1:]:
            held = merge(held, record)
        return held

    shuffled = [*history, *history[:2]]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert result(history) == result(shuffled)


def test_records_of_two_sessions_do_not_merge() -> None:
    a = Record(SID, SessionState.JOIN, 0, 1.0, b"", b"", b"")
    b = msgspec.structs.replace(a, sid="m002-0123456789abcdef")
    with pytest.raises(InputError, match="two sessions"):
        merge(a, b)


texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
described = st.builds(
    Metadata,
    name=texts.filter(bool),
    provider=texts,
    role=st.sampled_from(("hub", "worker", "gateway", "operator")),
    region=texts,
    hardware=st.builds(
        Hardware,
        gpus=st.lists(
            st.builds(Gpu, type=texts, count=st.integers(1, 16), memory_bytes=st.integers(0, 2**40))
        ).map(lambda gpus: tuple(gpus[:16])),
        cpus=st.integers(0, 1000),
    ),
    services=st.lists(
        st.builds(
            NodeService,
            model=texts.filter(bool),
            context=st.none() | st.integers(1, 2**20),
            layers=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
        ),
        max_size=3,
    ).map(tuple),
    price_usd_per_hour=st.none() | st.floats(0, 1000),
    stability=st.sampled_from(records.STABILITIES),
    labels=st.dictionaries(texts, texts, max_size=3),
)


@given(described, rivals)
def test_everything_survives_the_wire(said: Metadata, rival: Record) -> None:
    assert records.decode_metadata(records.encode_metadata(said)) == said
    assert records.decode(records.encode(rival)) == rival


@given(described)
def test_equal_metadata_has_equal_bytes(said: Metadata) -> None:
    turned = msgspec.structs.replace(said, labels=dict(reversed(said.labels.items())))
    assert records.encode_metadata(turned) == records.encode_metadata(said)


@pytest.mark.parametrize(
    "field",
    [
        {"name": ""},
        {"name": "x" * 129},
        {"name": "red\x1b[31m"},
        {"site": "two\nlines"},
        {"region": "\u202eback"},
        {"labels": {str(i): "" for i in range(33)}},
        {"labels": {"a": "x" * 257}},
        {"services": tuple(NodeService(model=f"m{i}") for i in range(65))},
        {"services": (NodeService(model=""),)},
        {"services": (NodeService(model="m", context=0),)},
        {"services": (NodeService(model="m", aliases=tuple(map(str, range(33)))),)},
        {"hardware": Hardware(gpus=(Gpu("A100", 0, 1),))},
        {"hardware": Hardware(gpus=(Gpu("A100", 1, 1),) * 17)},
        {"price_usd_per_hour": math.nan},
        {"price_usd_per_hour": math.inf},
        {"usd_per_mtoken_in": -1.0},
        {"ends_s": math.nan},
        {"weight": -0.5},
        {"stability": "eternal"},
        {"role": "king"},
        {"accept": "x" * 2049},
        {"revoked": ("00",) * 1025},
    ],
    ids=str,
)
def test_metadata_is_bounded(field: dict[str, object]) -> None:
    with pytest.raises(InputError, match="not a valid metadata"):
        records.encode_metadata(metadata("m001", **field))


def test_metadata_as_a_whole_is_bounded() -> None:
    services = tuple(
        NodeService(model="m" * 250 + str(i), aliases=("a" * 256,) * 8) for i in range(64)
    )
    with pytest.raises(InputError, match="too large"):
        records.encode_metadata(metadata("m001", services=services))


def test_fields_of_later_versions_are_skipped() -> None:
    body = msgspec.msgpack.encode({"name": "a", "provider": "p", "role": "hub", "mood": "good"})
    assert records.decode_metadata(body).name == "a"


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([SID]),
        msgspec.msgpack.encode([SID, 4, 0, 1.0, b"", b"", b""]),
        msgspec.msgpack.encode([SID, 1, -1, 1.0, b"", b"", b""]),
        msgspec.msgpack.encode([SID, 1, 1 << 53, 1.0, b"", b"", b""]),
        msgspec.msgpack.encode([SID, 1, 0, math.nan, b"", b"", b""]),
        msgspec.msgpack.encode([SID, 1, 0, 1.0, b"", b"", b"", b"more"]),
        msgspec.msgpack.encode([SID, 1, 0, 1.0, b"x" * 49_153, b"", b""]),
        msgspec.msgpack.encode([SID, 1, 0, 1.0, b"", b"x" * 8193, b""]),
        msgspec.msgpack.encode([SID, 1, 0, 1.0, b"", b"", b"x" * 513]),
        msgspec.msgpack.encode(["m001-0123", 1, 0, 1.0, b"", b"", b""]),
        msgspec.msgpack.encode(["../m001-0123456789abcdef", 1, 0, 1.0, b"", b"", b""]),
        b"\x91" * 70_000,
        b"x" * (64 * 1024 + 1),
    ],
)
def test_anything_else_is_not_a_record(wire: bytes) -> None:
    with pytest.raises(InputError):
        records.decode(wire)


@given(st.binary(max_size=200))
def test_noise_is_refused_without_surprise(noise: bytes) -> None:
    for read in (records.decode, records.decode_metadata):
        try:
            read(noise)
        except InputError:
            continue


def test_what_is_signed_names_everything() -> None:
    said = ("f", SID, SessionState.SERVING, 3, 5.0, b"body")
    others = (
        ("g", *said[1:]),
        (said[0], "m002-0123456789abcdef", *said[2:]),
        (*said[:2], SessionState.DOWN, *said[3:]),
        (*said[:3], 4, *said[4:]),
        (*said[:4], 6.0, said[5]),
        (*said[:5], b"other"),
    )
    signed = {records.signed_bytes(*values) for values in (said, *others)}
    assert len(signed) == 7


def test_a_farewell_keeps_only_who_it_was() -> None:
    whole = metadata("m001", engine="vllm", services=(NodeService(model="m"),), labels={"a": "b"})
    assert records.farewell(whole) == metadata("m001")
