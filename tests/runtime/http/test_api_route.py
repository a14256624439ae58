"""Routes of the management API: how they are found, who may ask, and how queries and bodies are read."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypedDict
from urllib.parse import quote, urlencode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.frozen import Frozen
from atoll.core.roles import ROLES, Role, may
from atoll.runtime.http.api_route import ApiRoute, RouteTable, read_object, read_query
from atoll.runtime.http.openapi import make_document
from atoll.runtime.openai import ApiError


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    of: Literal["a", "b"] = "a"
    last: Annotated[int, msgspec.Meta(ge=1, le=9)] = 5
    key: str | None = None


class Inner(Frozen):
    number: int


class Given(TypedDict):
    inner: Inner
    ratio: float | None


ROUTES = (
    ApiRoute("GET", "things", "viewer", "list", "All things", gives=Given, query=Asked),
    ApiRoute("POST", "things", "admin", "make", "Make one", takes=Inner, gives=Given, status=201),
    ApiRoute("GET", "things/{name}/parts/{part}", "member", "part", "A part"),
    ApiRoute("GET", "paths/{id:path}", "operator", "path", "Anything", takes=bytes),
)
TABLE = RouteTable(ROUTES)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(TEXT, TEXT)
def test_a_name_arrives_as_it_was_quoted(name: str, part: str) -> None:
    path = f"/atoll/v1/things/{quote(name, safe='')}/parts/{quote(part, safe='')}".encode()
    assert TABLE.find(b"GET", path, "admin") == (ROUTES[2], {"name": name, "part": part})


@given(st.sampled_from(ROUTES), st.sampled_from(ROLES))
def test_a_role_may_what_lesser_ones_may(route: ApiRoute[str], role: Role) -> None:
    path = route.shown_path.replace("{", "").replace("}", "").encode()
    if may(role, route.role):
        assert TABLE.find(route.method.encode(), path, role)[0] == route
        return
    with pytest.raises(ApiError, match=f"{route.role} may do this") as refused:
        TABLE.find(route.method.encode(), path, role)
    assert (refused.value.status, refused.value.code) == (403, "role_forbids")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        (b"GET", b"/atoll/v1/", 404),
        (b"GET", b"/things", 404),
        (b"GET", b"/atoll/v1/things/a/parts/b/c", 404),
        (b"GET", b"/atoll/v1/things/", 404),
        (b"GET", b"/atoll/v1/things\xff", 404),
        (b"DELETE", b"/atoll/v1/things", 405),
    ],
)
def test_what_is_not_there(method: bytes, path: bytes, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        TABLE.find(method, path, "admin")
    assert refused.value.status == status
    assert refused.value.allow == ("GET, POST" if status == 405 else None)


def test_slashes_are_part_of_some_names() -> None:
    assert TABLE.find(b"GET", b"/atoll/v1/paths/lab/gpu1", "admin")[1] == {"id": "lab/gpu1"}
    assert ROUTES[3].shown_path == "/atoll/v1/paths/{id}"


@given(st.fixed_dictionaries({}, optional={"of": TEXT, "last": TEXT, "key": TEXT, "no": TEXT}))
def test_a_query_is_as_its_type_says_or_refused(fields: dict[str, str]) -> None:
    query = urlencode(fields).encode()
    of, last = fields.get("of", "a"), fields.get("last", "5")
    if "no" not in fields and of in ("a", "b") and last in map(str, range(1, 10)):
        assert read_query(Asked, query) == Asked(of, int(last), fields.get("key"))  # type: ignore[arg-type]
        return
    try:
        # What is a number in another way of writing it is one still.
        assert 1 <= read_query(Asked, query).last <= 9
    except ApiError as error:
        assert (error.status, error.param in fields) == (400, True)  # noqa: PT017


@pytest.mark.parametrize("query", [b"of=a&of=b", b"of=%ff", b"of=", b"last=x", b"last=10"])
def test_a_query_that_means_nothing(query: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_query(Asked, query)
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"a": NaN}', b"\xff", b'{"a":' * 3000, b"null"])
def test_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_object(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_the_description_has_the_types() -> None:
    document = make_document("Test", {"all": ROUTES})
    schemas: dict[str, Any] = document["components"]["schemas"]
    assert schemas["Given"]["properties"]["inner"] == {"$ref": "#/components/schemas/Inner"}
    assert schemas["Inner"]["properties"]["number"] == {"title": "Number", "type": "integer"}
    listed = document["paths"]["/atoll/v1/things"]["get"]
    assert [(f["name"], f["schema"].get("maximum")) for f in listed["parameters"]] == [
        ("of", None),
        ("last", 9),
        ("key", None),
    ]
    made = document["paths"]["/atoll/v1/things"]["post"]
    assert "201" in made["responses"]
    assert "200" not in made["responses"]
    assert json.dumps(document)


def test_two_types_of_one_name_are_refused() -> None:
    class Given(Frozen):
        other: int

    route = ApiRoute("PUT", "x", "viewer", "x", "X", takes=Given)
    with pytest.raises(TypeError, match="one name: Given"):
        make_document("Test", {"all": (*ROUTES, route)})
