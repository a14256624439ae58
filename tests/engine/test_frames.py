"""Messages survive the wire, and nothing that is not a message gets in."""

from __future__ import annotations

import contextlib
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.request_parameters import OutputFormat, SamplingParams
from atoll.engine.engine_errors import FrameError
from atoll.engine.engine_messages import (
    MAX_REPORTS,
    REPORT_COLUMNS,
    Activations,
    Evicted,
    Failed,
    Heartbeat,
    Hop,
    KvTransfer,
    Message,
    NodeStats,
    Open,
    OpenBody,
    Opened,
    Release,
    Sampled,
    SampledBody,
    SchedulerHello,
    StepReport,
    Stop,
    Tokens,
    table_of,
)
from atoll.engine.frames import MAX_BODY_BYTES, VERSION, decode, encode

HOP = Hop(node="n0", endpoint="tcp://127.0.0.1:5000", start=0, end=4)
STATS = NodeStats(
    name="n0", endpoint=HOP.endpoint, incarnation=1, start=0, end=4, block_size=16, blocks=9
)
PLAIN: list[Message] = [
    Opened(seq=1, epoch=2, hit=16),
    Evicted(seq=1, epoch=0, node="n0"),
    Failed(seq=1, epoch=0, node="n0", message="no \N{SNOWMAN}"),
    SchedulerHello(reply_to="tcp://127.0.0.1:6000"),
    Heartbeat(stats=STATS),
    Stop(drain=False),
]


KINDS = get_args(Message)


def over_the_wire(message: Message) -> Message:
    return decode([bytes(part) for part in encode(message)])


@pytest.mark.parametrize("message", PLAIN, ids=lambda m: type(m).__name__)
def test_plain_messages_come_back_equal(message: Message) -> None:
    assert over_the_wire(message) == message


def test_open_comes_back_with_every_field() -> None:
    sampling = SamplingParams(
        max_tokens=7, temperature=0.5, stop=("a",), guide=OutputFormat(kind="regex", text="[a-z]+")
    )
    body = OpenBody(
        seq=2**62,
        epoch=3,
        hop=1,
        route=(HOP, HOP),
        prompt_length=2,
        max_length=9,
        arrival=4,
        reply_to="tcp://127.0.0.1:6000",
        sampling=sampling,
        eos=(2,),
        hit=16,
        kv_to=(HOP,),
        expects_kv=True,
    )
    back = over_the_wire(Open(body, np.array([5, 6, 7])))
    assert isinstance(back, Open)
    assert back.body == body
    assert back.tokens.tolist() == [5, 6, 7]


def test_tables_come_back_equal() -> None:
    release = over_the_wire(Release(table_of([(1, 2), (3, 4)], 2)))
    assert isinstance(release, Release)
    assert release.table.tolist() == [[1, 2], [3, 4]]
    sampled = over_the_wire(
        Sampled(
            table_of([(1, 0, 5, 42, 1)], 5),
            np.array([-0.5], np.float32),
            SampledBody(top={0: [(42, -0.5), (7, -2.0)]}),
        )
    )
    assert isinstance(sampled, Sampled)
    assert sampled.body.top == {0: [(42, -0.5), (7, -2.0)]}
    assert sampled.logprobs.tolist() == [-0.5]
    empty = over_the_wire(Tokens(table_of([], 4)))
    assert isinstance(empty, Tokens)
    assert empty.table.shape == (0, 4)
    assert empty.reports.shape == (0, REPORT_COLUMNS)
    report = StepReport(node=2**63 - 1, place=3, rows=9, sequences=2, nanoseconds=7)
    told = over_the_wire(Tokens(table_of([], 4), table_of([report], REPORT_COLUMNS)))
    assert isinstance(told, Tokens)
    assert [StepReport(*row) for row in told.reports.tolist()] == [report]


def test_reports_of_steps_are_few_and_sane() -> None:
    good = (1, 2, 3, 4, 5)
    for rows, columns in (
        ([good] * (MAX_REPORTS + 1), REPORT_COLUMNS),
        ([(1, 2, 3, -4, 5)], REPORT_COLUMNS),
        ([good[:4]], 4),
    ):
        with pytest.raises(FrameError):
            over_the_wire(Tokens(table_of([], 4), table_of(rows, columns)))


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_come_back_bit_for_bit(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'engine'")
    hidden = torch.randn(5, 3).to(getattr(torch, dtype))
    table = table_of([(1, 0, 1, 0, 4, 0, -1), (2, 0, 1, 9, 1, 1, 17)], 7)
    reports = table_of([(1, 2, 3, 4, 5)], REPORT_COLUMNS)
    back = over_the_wire(Activations(table, hidden, reports))
    assert isinstance(back, Activations)
    assert back.reports.tolist() == reports.tolist()
    assert back.hidden.dtype == hidden.dtype
    assert torch.equal(back.hidden, hidden)
    data = torch.randn(2, 2, 3, 4, 5).to(getattr(torch, dtype))
    kv = over_the_wire(KvTransfer(table_of([(1, 0, 0, 4, 6, 0)], 6), data))
    assert isinstance(kv, KvTransfer)
    assert torch.equal(kv.data, data)


def test_counts_must_add_up_to_the_rows() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'engine'")
    for counts in ((4, 2), (6, -1)):
        rows = [(1, 0, 1, 0, count, 0, -1) for count in counts]
        with pytest.raises(FrameError, match="add up"):
            over_the_wire(Activations(table_of(rows, 7), torch.zeros(5, 3)))


GOOD = [bytes(part) for part in encode(Release(table_of([(1, 2)], 2)))]


def with_header(at: int, value: int) -> list[bytes]:
    header = bytearray(GOOD[0])
    header[at] = value
    return [bytes(header), *GOOD[1:]]


DAMAGED = {
    "magic": with_header(0, 0),
    "version": with_header(4, VERSION + 1),
    "kind": with_header(6, 200),
    "another kind": with_header(6, Tokens.kind),
    "more arrays": with_header(8, 2),
    "dtype": with_header(12, 99),
    "dimensions": with_header(13, 9),
    "shape": with_header(16, 5),
    "hidden shape": with_header(-1, 1),
    "short header": [GOOD[0][:7], *GOOD[1:]],
    "long header": [GOOD[0] + b"x", *GOOD[1:]],
    "short array": [*GOOD[:2], GOOD[2][:-1]],
    "no array": GOOD[:2],
    "one part": GOOD[:1],
    "long body": [GOOD[0], b"x" * (MAX_BODY_BYTES + 1), GOOD[2]],
}


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_message_is_refused(change: str) -> None:
    with pytest.raises(FrameError):
        decode(DAMAGED[change])


def test_an_unknown_field_is_refused() -> None:
    parts = [bytes(part) for part in encode(Stop())]
    with pytest.raises(FrameError, match="no such field"):
        decode([parts[0], b'{"drain": true, "run": "rm"}'])


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_noise_is_refused_and_nothing_else_happens(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode(parts)


@given(st.data())
def test_a_flipped_bit_never_does_worse_than_be_refused(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([*PLAIN, Release(table_of([(1, 2)], 2))]))
    parts = [bytearray(part) for part in encode(message)]
    part = parts[data.draw(st.integers(0, 1))]
    if part:
        part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(FrameError):
        assert type(decode([bytes(p) for p in parts])) in KINDS
