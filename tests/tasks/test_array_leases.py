"""Leases against a plain model: a list of who holds what until when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.tasks.array_leases import LeaseBook

HANDLES = st.sampled_from("abc")
HOLDERS = st.sampled_from("xyz")
SIZES = {"a": 1, "b": 20, "c": 300}
steps = st.one_of(
    st.tuples(st.just("grant"), HANDLES, HOLDERS, st.integers(0, 30)),
    st.tuples(st.just("renew"), HANDLES, HOLDERS, st.integers(0, 30)),
    st.tuples(st.just("release"), HANDLES, HOLDERS, st.just(0)),
    st.tuples(st.just("drop"), HANDLES, HOLDERS, st.just(0)),
    st.tuples(st.just("expire"), HANDLES, HOLDERS, st.integers(0, 10)),
)


@given(st.lists(steps, min_size=20, max_size=60))
def test_leases_do_what_a_plain_list_does(doing: list[tuple[str, str, str, int]]) -> None:
    book = LeaseBook()
    model: dict[tuple[str, str], float] = {}
    now = 0.0

    def held() -> set[str]:
        return {handle for handle, _ in model}

    for what, handle, holder, number in doing:
        before = held()
        freed: object = None
        if what == "grant":
            book.grant(handle, SIZES[handle], holder, now + number)
            model[handle, holder] = max(model.get((handle, holder), now + number), now + number)
        elif what == "renew":
            known = (handle, holder) in model
            assert book.renew(handle, holder, now + number) == known
            if known:
                model[handle, holder] = max(model[handle, holder], now + number)
        elif what == "release":
            freed = [handle] if book.release(handle, holder) else []
            model.pop((handle, holder), None)
        elif what == "drop":
            freed = book.drop_holder(holder)
            model = {key: end for key, end in model.items() if key[1] != holder}
        else:
            now += number
            freed = sorted(book.expire(now))
            model = {key: end for key, end in model.items() if end > now}
        if freed is not None:
            assert freed == sorted(before - held())
        assert len(book) == len(held())
        assert book.leases == len(model)
        assert book.total_bytes == sum(SIZES[each] for each in held())
        for each in SIZES:
            assert (each in book) == (each in held())
            assert book.holders(each) == {
                who: end for (what_, who), end in model.items() if what_ == each
            }
        if model:
            assert book.next_end_s is not None
            assert book.next_end_s <= min(model.values())


def test_renewing_forever_keeps_the_book_small() -> None:
    book = LeaseBook()
    book.grant("a", 1, "x", 0)
    for end in range(10_000):
        book.renew("a", "x", end)
    assert len(book._ends) < 200
    assert book.expire(9998) == []
    assert book.expire(9999) == ["a"]


def test_a_lease_is_never_shortened() -> None:
    book = LeaseBook()
    book.grant("a", 1, "x", 9)
    book.grant("a", 1, "x", 3)
    assert book.renew("a", "x", 5)
    assert book.holders("a") == {"x": 9}
    assert book.expire(8) == []
    assert book.expire(9) == ["a"]
    assert not book.renew("a", "x", 20)


def test_what_cannot_be_is_refused() -> None:
    book = LeaseBook()
    book.grant("a", 1, "x", 0)
    with pytest.raises(InputError, match="has 1 bytes, not 2"):
        book.grant("a", 2, "y", 0)
    with pytest.raises(InputError, match="nbytes"):
        book.grant("b", -1, "x", 0)
    with pytest.raises(InputError, match="until_s"):
        book.grant("b", 1, "x", float("nan"))
