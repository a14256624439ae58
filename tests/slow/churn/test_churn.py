"""The check of nodes that come and go sees every token that is lost, doubled or out of place."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.slow.answers import BrokenAnswerError
from tests.slow.churn.churn import Outcome
from tests.slow.churn.churn_clients import Reader, Seen
from tests.slow.churn.churn_engine import Engine, prompt, word
from tests.slow.churn.churn_processes import Ledger


class Asked:
    """A request to an engine and what came of it."""

    def __init__(self, body: dict[str, object], path: bytes = b"/v1/completions") -> None:
        self.path = path
        self.body = json.dumps(body).encode()
        self.on_cancel: Callable[[], None] | None = None
        self.status = 0
        self.data = b""
        self.ended = False

    def head(self, status: int, content_type: bytes, retry_after: bytes = b"") -> None:
        self.status = status

    def send(self, data: bytes) -> None:
        assert not self.ended
        self.data += data

    def end(self) -> None:
        self.ended = True


def answered(body: dict[str, object]) -> Asked:
    engine, asked = Engine(4), Asked(body)
    engine.handle(asked)
    for _ in range(100):
        engine.step()
    assert asked.ended
    return asked


def test_an_answer_is_what_a_client_expects() -> None:
    asked = answered({"prompt": prompt(7), "max_tokens": 20})
    reader = Reader(7, 20)
    assert sum(reader.feed(asked.data[at : at + 37]) for at in range(0, len(asked.data), 37)) == 20
    assert reader.complete
    for other, kind in ((Reader(8, 20), "reordered"), (Reader(7, 21), "truncated")):
        with pytest.raises(BrokenAnswerError) as caught:
            other.feed(asked.data)
        assert caught.value.kind == kind


def test_lost_doubled_and_swapped_tokens_are_seen() -> None:
    events = answered({"prompt": prompt(7), "max_tokens": 20}).data.split(b"\n\n")[:-1]

    def verdict(changed: list[bytes]) -> str:
        reader = Reader(7, 20)
        try:
            reader.feed(b"".join(event + b"\n\n" for event in changed))
        except BrokenAnswerError as error:
            return error.kind
        return "complete" if reader.complete else "cut"

    assert verdict(events) == "complete"
    assert verdict([*events[:5], *events[6:]]) == "reordered"
    assert verdict([*events[:5], events[4], *events[5:]]) == "reordered"
    assert verdict([*events[:5], events[6], events[5], *events[7:]]) == "reordered"
    assert verdict(events[:-1]) == "cut"
    assert verdict([*events[:10], *events[-1:]]) == "truncated"
    assert verdict([*events[:10], b'data: {"error":{"message":"x"}}']) == "errors"
    # A count that is wrong is an error even if all tokens came.
    wrong = events[-2].replace(b'"completion_tokens":20', b'"completion_tokens":19')
    assert verdict([*events[:-2], wrong, events[-1]]) == "errors"


def test_any_node_goes_on_with_an_answer() -> None:
    said = "".join(word(7, at) for at in range(12))
    by_text = answered({"prompt": prompt(7) + said, "max_tokens": 8})
    state = {"resume": {"text": said, "tokens": 12}}
    by_atoll = answered({"prompt": prompt(7), "max_tokens": 20, "atoll": state})
    for asked, prompted, counted in ((by_text, 22, 8), (by_atoll, 10, 20)):
        chunks = [json.loads(e[6:]) for e in asked.data.decode().split("\n\n")[:-2]]
        words = [c["text"] for chunk in chunks for c in chunk["choices"]]
        assert words == [word(7, at) for at in range(12, 20)]
        assert chunks[-1]["usage"]["prompt_tokens"] == prompted
        assert chunks[-1]["usage"]["completion_tokens"] == counted


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": prompt(7) + word(7, 1), "max_tokens": 8},
        {"prompt": prompt(7) + word(7, 0)[:-1], "max_tokens": 8},
        {"prompt": prompt(7), "max_tokens": 8, "atoll": {"resume": {"text": "", "tokens": 1}}},
        {"prompt": "no seed", "max_tokens": 8},
        {"max_tokens": 8},
    ],
)
def test_a_continuation_that_is_wrong_is_refused(body: dict[str, object]) -> None:
    assert answered(body).status == 400


def test_an_engine_has_a_fixed_speed_and_is_fair() -> None:
    engine = Engine(4)
    asked = [Asked({"prompt": prompt(at), "max_tokens": 50}) for at in range(10)]
    for each in asked:
        engine.handle(each)
    for _ in range(50):
        engine.step()
    tokens = [each.data.count(b'"text"') for each in asked]
    assert tokens == [20] * 10
    cancel = asked[0].on_cancel
    assert cancel is not None
    cancel()
    for _ in range(50):
        engine.step()
    assert asked[0].data.count(b'"text"') == 20
    assert sum(each.data.count(b'"text"') for each in asked[1:]) == 9 * 20 + 200
    other = Asked({}, b"/elsewhere")
    engine.handle(other)
    assert other.status == 404


def test_books_that_differ_are_seen() -> None:
    outcome = Outcome(Seen(requests=3, delivered=100), ledger=Ledger(4, 98, 99, 1))
    assert outcome.ledger_diff == 4
