"""Every handle that is granted is released exactly once; what was made again stands for what was."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.runtime.graph_server.request_leases import HandleLedger, array_bytes
from atoll.tasks.values import Handle, Value, handles_in


def handle(number: int, *, inline: bool = False) -> Handle:
    data = b"\0" * 8 if inline else b""
    return Handle(f"{number:032x}", "o", "h:1", "host", "", "float32", (2,), 0, data)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 30), max_size=4)),
            st.none(),
        ),
        max_size=30,
    )
)
def test_every_handle_is_released_exactly_once(
    story: list[tuple[str, list[int]] | None],
) -> None:
    ledger = HandleLedger()
    granted: set[str] = set()
    released: Counter[str] = Counter()
    for event in [*story, None]:
        if event is None:
            for handles in ledger.release().values():
                released.update(each.id for each in handles)
        else:
            executor, numbers = event
            ledger.grant(executor, {"parts": [handle(n) for n in numbers]}, ("maker", 1))
            granted.update(handle(n).id for n in numbers)
    assert set(released) == granted
    assert all(count == 1 for count in released.values())


def test_handles_that_carry_their_arrays_are_not_held() -> None:
    ledger = HandleLedger()
    ledger.grant("a", [handle(1, inline=True), handle(2)])
    assert ledger.held() == {"a": [handle(2)]}


def test_successors_replace_handles_however_deep_and_often() -> None:
    ledger = HandleLedger()
    first, second, third = handle(1), handle(2), handle(3)
    ledger.made_again({"states": first}, {"states": second})
    ledger.made_again([second], [third])
    value: Value = {"messages": [{"embeds": first}, "text", handle(9)]}
    assert ledger.current(value) == {"messages": [{"embeds": third}, "text", handle(9)]}
    assert ledger.successor(first.id) == third
    assert ledger.successor(third.id) is None


def test_what_made_a_handle_is_known_after_its_release() -> None:
    ledger = HandleLedger()
    ledger.grant("a", handle(1), (4, None))
    ledger.release()
    assert ledger.maker(handle(1).id) == (4, None)
    assert ledger.maker(handle(2).id) is None


def test_arrays_are_found_and_counted() -> None:
    value: Value = {"a": handle(1), "b": [handle(2), {"c": handle(3)}], "d": 4}
    assert [each.id for each in handles_in(value)] == [handle(n).id for n in (1, 2, 3)]
    assert array_bytes(value) == 24
