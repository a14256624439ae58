"""Who answers a request for a choice between models, without a gateway."""

from __future__ import annotations

from collections import Counter

import pytest

from atoll.core.errors import InputError
from atoll.plan.choice import Choice, ModelMix, Variant
from atoll.runtime.gateway.served_choices import ChoiceTable, ServedChoice, conversation_key
from atoll.runtime.openai import ApiError, ChatRequest, EmbeddingRequest, Message, Role
from atoll.runtime.pool.routes import ChoiceRoutes, RoutesTold

ROUTES = ChoiceRoutes(
    shares={"chat.small": 0.5, "chat.large": 0.2, "shared.small": 0.2, "chat.middle": 0.1},
    errors={"chat.small": 0.06, "chat.large": 0.01, "shared.small": 0.06, "chat.middle": 0.03},
    models={"chat.small": "small", "chat.large": "large", "shared.small": "small"},
)


def ask(*messages: tuple[Role, str], user: str | None = None) -> ChatRequest:
    return ChatRequest(
        model="chat", user=user, messages=[Message(role, text) for role, text in messages]
    )


def test_who_may_answer_instead() -> None:
    served = ServedChoice("chat", ROUTES)

    def order(dealt: str) -> list[tuple[str, str]]:
        return [(c.model, c.how) for c in served.candidates(dealt)]

    assert order("chat.small") == [
        ("chat.small", "exact"),
        ("shared.small", "variant"),  # the same model
        ("chat.large", "variant"),
        ("chat.middle", "variant"),
    ]
    assert order("chat.middle") == [
        ("chat.middle", "exact"),
        ("chat.large", "variant"),
        ("chat.small", "worse"),
        ("shared.small", "worse"),
    ]
    assert [how for _, how in order("chat.large")] == ["exact", "worse", "worse", "worse"]
    assert order("chat.large")[1][0] == "chat.middle"  # of the worse ones the best


def test_requests_are_dealt_once_they_are_let_in() -> None:
    table = ChoiceTable()
    table.configure({"chat": ROUTES})
    found: Counter[str] = Counter()
    for _ in range(100):
        table.turn(ask(("user", "hi")), {})  # who is refused takes no turn
        turn = table.turn(ask(("user", "hi")), {})
        assert turn is not None
        found[turn.take()[0].model] += 1
    assert found == {"chat.small": 50, "chat.large": 20, "shared.small": 20, "chat.middle": 10}
    assert table.turn(ChatRequest(model="other", messages=[Message("user", "hi")]), {}) is None


def test_what_stays_as_it_is_goes_on_where_it_was() -> None:
    table = ChoiceTable()
    table.configure({"chat": ROUTES})
    first = table.by_name["chat"]
    table.tell({"search": ROUTES})
    assert table.by_name["chat"] is first
    table.tell({"chat": ROUTES.model_copy(update={"sticky": True})})
    assert table.by_name["chat"].routes.sticky  # what is told counts first
    assert "search" not in table.by_name
    table.tell({})
    assert table.by_name["chat"].routes == ROUTES


def test_a_conversation_is_known_by_how_it_began() -> None:
    opening: tuple[tuple[Role, str], ...] = (("system", "be brief"), ("user", "why?"))
    key = conversation_key(ask(*opening), {})
    later = ask(*opening, ("assistant", "because"), ("user", "and?"))
    assert key is not None
    assert conversation_key(later, {}) == key
    assert conversation_key(ask(("system", "be brief"), ("user", "how?")), {}) != key
    assert conversation_key(ask(*opening, user="bob"), {}) != key
    session = {b"x-atoll-session": b"17"}
    named = conversation_key(ask(*opening), session)
    assert named == conversation_key(ask(("user", "something else")), session)
    assert conversation_key(EmbeddingRequest(model="chat", input="x"), {}) is None
    with pytest.raises(ApiError):
        conversation_key(ask(*opening), {b"x-atoll-session": b"x" * 300})


def test_sticky_conversations_stay_and_keep_shares() -> None:
    table = ChoiceTable()
    table.configure({"chat": ROUTES.model_copy(update={"sticky": True})})
    first: dict[int, str] = {}
    for turn_number in range(3):
        for number in range(400):
            turn = table.turn(ask(("user", f"question {number}"), ("user", "x" * turn_number)), {})
            assert turn is not None
            turn.take()
            assert first.setdefault(number, turn.service) == turn.service
    share = sum(service == "chat.small" for service in first.values()) / 400
    assert abs(share - 0.5) < 0.1


def test_a_plan_says_how_to_deal() -> None:
    choice = Choice(
        name="chat",
        variants=(
            Variant(service="chat.a", model="a@fp8", error=0.05),
            Variant(service="chat.b", model="b", error=0.01),
            Variant(service="chat.c", model="c", error=0.0),
        ),
        sticky=True,
    )
    mix = ModelMix.of(choice, {"chat.a": 0.75, "chat.b": 0.25})
    routes = ChoiceRoutes.of(mix)
    assert routes.shares == {"chat.a": 0.75, "chat.b": 0.25}
    assert routes.errors == {"chat.a": 0.05, "chat.b": 0.01}
    assert routes.models == {"chat.a": "a@fp8", "chat.b": "b"}
    assert routes.sticky
    told = RoutesTold(choices={"chat": routes})
    assert RoutesTold.from_json(told.to_json()) == told
    assert "choices" not in RoutesTold().model_dump()


@pytest.mark.parametrize(
    "fields",
    [
        {"shares": {}},
        {"shares": {"a": 0.0}},
        {"shares": {"a": -1.0}},
        {"shares": {"a": 1.0}, "errors": {"b": 0.1}},
        {"shares": {"a": 1.0}, "errors": {"a": 2.0}},
        {"shares": {"a": 1.0}, "models": {"b": "m"}},
    ],
)
def test_routes_that_are_none(fields: dict[str, object]) -> None:
    with pytest.raises(InputError):
        ChoiceRoutes.parse(fields)
