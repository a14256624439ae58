"""What is announced, what counts as well, which orders are obeyed: decisions without a network."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.join import JoinSettings
from atoll.core.errors import AtollError, InputError
from atoll.engine.weights.sources import DEFAULT_MODEL
from atoll.fabric.identity.identity import Identity, RefusedError, Verifier
from atoll.fabric.registry.records import Gpu, Hardware, NodeService, SessionState, encode_metadata
from atoll.runtime.endpoints.endpoint import RunDirectory
from atoll.runtime.join.announcement import Announcement, NodeSituation, choose_announcement
from atoll.runtime.join.assignment import (
    PURPOSE,
    Assignment,
    check,
    read_assignment,
    write_order,
)
from atoll.runtime.join.engine_start import engine_for_order, prepare
from atoll.runtime.join.join_options import JoinOptions
from atoll.runtime.join.offers import ServerOffer
from atoll.runtime.join.signed_orders import (
    MAX_ORDER_BYTES,
    VALID_S,
    Order,
    OrderVerifier,
    encode,
    read_reply,
)
from atoll.runtime.join.watcher import Health

OFFER = ServerOffer((NodeService(model="m"),), "vllm")
SITUATIONS = st.builds(
    NodeSituation,
    offer=st.sampled_from([None, OFFER]),
    dead=st.booleans(),
    idle=st.booleans(),
    leaving=st.booleans(),
)


@given(st.lists(SITUATIONS, max_size=30))
def test_a_session_never_goes_back_and_serves_only_what_is_well(
    history: list[NodeSituation],
) -> None:
    said = Announcement(SessionState.JOIN, None)
    for now in history:
        new = choose_announcement(said, now)
        hindered = now.dead or now.idle or now.leaving
        if new.offer is not None:
            assert new.state is SessionState.SERVING
            assert now.offer == new.offer
            assert not hindered
        elif now.offer is not None:
            assert hindered
        if new.state < said.state:
            # A new session: only for one that serves again, or that offers its hardware anew.
            assert new.offer is not None or now.idle
        said = new
        # Nothing more to say of the same situation.
        assert choose_announcement(said, now) == said


def test_the_story_of_an_engine() -> None:
    said = Announcement(SessionState.JOIN, None)
    told = []
    for now in (
        NodeSituation(),
        NodeSituation(OFFER),
        NodeSituation(),
        NodeSituation(OFFER),
        NodeSituation(OFFER, dead=True),
        NodeSituation(),
        NodeSituation(OFFER),
        NodeSituation(OFFER, leaving=True),
    ):
        said = choose_announcement(said, now)
        told.append((said.state.name, said.offer is not None))
    assert told == [
        ("JOIN", False),
        ("SERVING", True),
        ("SERVING", False),
        ("SERVING", True),
        ("DOWN", False),
        ("DOWN", False),
        ("SERVING", True),
        ("SERVING", False),
    ]


def test_an_engine_that_never_served_does_not_go_down() -> None:
    said = choose_announcement(Announcement(SessionState.JOIN, None), NodeSituation(dead=True))
    assert said == Announcement(SessionState.JOIN, None)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_health_counts_failures_in_a_row(looks: list[bool], most: int) -> None:
    health, in_a_row, served = Health(most), 0, False
    for number, good in enumerate(looks):
        if good:
            health.good(OFFER)
            in_a_row, served = 0, True
        else:
            health.bad("no", float(number))
            in_a_row += 1
        assert (health.offer is not None) == (served and in_a_row < most)
        assert health.served == served
        assert health.unwell_s(float(number)) == (max(0, in_a_row - 1) if in_a_row else 0)
    health.reset()
    assert health.prove
    assert not health.served


# Orders


@pytest.fixture
def operator() -> Identity:
    return Identity.self_made("m001", "olga", "uni", "operator")


SID = "m007-0123456789abcdef"
ORDER = Assignment(model="org/m", settings={"max-model-len": "4096"})
NOW_S = time.time()


def orders() -> OrderVerifier:
    return OrderVerifier(Verifier("open", None), PURPOSE)


def test_an_operators_order_is_obeyed_once(operator: Identity) -> None:
    taking = orders()
    data = write_order(ORDER, operator, "open", SID, NOW_S)
    body, person = taking.read(data, SID, NOW_S + 3.0)
    assert (read_assignment(body), person.name) == (ORDER, "olga")
    with pytest.raises(RefusedError, match="given before"):
        taking.read(data, SID, NOW_S + 4.0)
    again = write_order(ORDER, operator, "open", SID, NOW_S)
    assert read_assignment(taking.read(again, SID, NOW_S + 5.0)[0]) == ORDER


def test_an_order_is_remembered_for_as_long_as_it_holds(operator: Identity) -> None:
    taking = orders()
    early = write_order(ORDER, operator, "open", SID, NOW_S + VALID_S)
    taking.read(early, SID, NOW_S)
    with pytest.raises(RefusedError, match="given before"):
        taking.read(early, SID, NOW_S + 2 * VALID_S)
    with pytest.raises(RefusedError, match="too old"):
        taking.read(early, SID, NOW_S + 2 * VALID_S + 1.0)


def test_other_orders_are_refused(operator: Identity) -> None:
    taking = orders()
    good = write_order(ORDER, operator, "open", SID, NOW_S)
    with pytest.raises(RefusedError, match="another session"):
        taking.read(good, "m007-ffffffffffffffff", NOW_S)
    with pytest.raises(RefusedError, match="too old"):
        taking.read(good, SID, NOW_S + VALID_S + 1)
    with pytest.raises(RefusedError, match="not signed"):
        OrderVerifier(Verifier("other", None), PURPOSE).read(good, SID, NOW_S)
    with pytest.raises(RefusedError, match="not signed"):
        OrderVerifier(Verifier("open", None), "another purpose").read(good, SID, NOW_S)
    with pytest.raises(RefusedError, match="too large"):
        taking.read(b"x" * (MAX_ORDER_BYTES + 1), SID, NOW_S)
    with pytest.raises(RefusedError, match="cannot be read"):
        taking.read(b"x", SID, NOW_S)
    with pytest.raises(RefusedError, match="too old"):
        taking.read(write_order(ORDER, operator, "open", SID, float("nan")), SID, NOW_S)
    worker = Identity.self_made("m002", "w", "uni", "worker")
    with pytest.raises(RefusedError, match="no operator"):
        taking.read(write_order(ORDER, worker, "open", SID, NOW_S), SID, NOW_S)
    other = msgspec.msgpack.decode(good, type=Order)
    forged = msgspec.structs.replace(other, body=encode(Assignment(model="org/evil")))
    with pytest.raises(RefusedError, match="not signed"):
        taking.read(encode(forged), SID, NOW_S)
    # None of those was taken.
    assert read_assignment(taking.read(good, SID, NOW_S)[0]) == ORDER


def test_a_foreign_operator_is_refused(operator: Identity) -> None:
    verifier = Verifier("f", operator.certificate)
    stranger = Identity.self_made("m001", "mallory", "uni", "operator")
    data = write_order(ORDER, stranger, "f", SID, NOW_S)
    with pytest.raises(RefusedError, match="not of this fabric"):
        OrderVerifier(verifier, PURPOSE).read(data, SID, NOW_S)


@pytest.mark.parametrize(
    "bad",
    [
        Assignment(model="--help"),
        Assignment(model="org/m --trust-remote-code"),
        Assignment(model="org/m; rm -rf /"),
        Assignment(model="../secrets"),
        Assignment(model="/etc/passwd", name="x"),
        Assignment(model="https://evil.example/m"),
        Assignment(engine="llamacpp", model="pypi://wheel==1.0/x.gguf"),
        Assignment(engine="llamacpp", model=f"pypi://wheel==1.0/../x.gguf#{'0' * 64}"),
        Assignment(model="org/m", name="-x"),
        Assignment(model="org/m", settings={"trust-remote-code": "true"}),
        Assignment(model="org/m", settings={"max-model-len": "4096 --api-key x"}),
        Assignment(model="org/m", settings={"dtype": "--help"}),
        Assignment(model="org/m", settings={"gpu-memory-utilization": "17"}),
        Assignment(engine="llamacpp", model="org/m", settings={"max-model-len": "1"}),
    ],
)
def test_only_known_models_and_settings_pass(bad: Assignment) -> None:
    with pytest.raises(AtollError):
        check(bad)


def test_a_file_in_a_wheel_may_be_assigned_by_its_hash() -> None:
    check(Assignment(engine="llamacpp", model=DEFAULT_MODEL, name="small"))


def test_weights_below_the_nodes_folder_may_be_assigned(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "m").mkdir(parents=True)
    check(Assignment(model=str(folder / "m"), name="m"), models=str(folder))
    (folder / "out").symlink_to(tmp_path)
    for other in (tmp_path / "x", folder / "out" / "x", folder / ".." / "x"):
        with pytest.raises(InputError, match="--model"):
            check(Assignment(model=str(other), name="m"), models=str(folder))


def test_an_order_becomes_a_command_without_a_shell(tmp_path: Path) -> None:
    hardware = Hardware(gpus=(Gpu(type="L4", count=2, memory_bytes=1),), cpus=2)
    settings = {"max-model-len": "4096", "tensor-parallel-size": "1"}
    order = Assignment(model="hf://org/m", name="chat", settings=settings)
    check(order)
    prepared = engine_for_order(order, JoinOptions(), hardware, RunDirectory(tmp_path))
    assert prepared.command is not None
    kept, _, text = " ".join(prepared.command.arguments).partition(" -- ")
    assert " -m atoll.runtime.endpoints.compile_cache " in kept
    assert text.startswith("vllm serve org/m --host 127.0.0.1 --port ")
    assert "--served-model-name chat --tensor-parallel-size 1 " in text
    assert text.endswith("--max-model-len 4096")
    assert prepared.server.engine == "vllm"


def test_an_answer_that_cannot_be_read_is_a_refusal() -> None:
    assert not read_reply(b"\xff").accepted


# Options


def test_options_of_a_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "join.yaml"
    path.write_text(
        "region: eu\nprice: $1.5/h\nhealth-interval: 500ms\nlabels: {rack: r1}\n"
        "command: vllm serve 'a model' --port 8001\nmax_inflight: 8\naccept: allow:uni\n"
    )
    found = JoinSettings.read({"config": path, "region": "us"})
    assert (found.region, found.price, found.health_interval) == ("us", 1.5, 0.5)
    assert found.command == ("vllm", "serve", "a model", "--port", "8001")
    metadata = found.metadata("n", "uni", "worker")
    assert metadata.max_inflight == 8
    assert metadata.labels == {"rack": "r1"}
    encode_metadata(metadata)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regoin": "eu"}, "regoin"),
        ({"generic": True}, "has a name"),
        ({"service": "ocr"}, "has a name"),
        ({"service": "ocr", "generic": True}, "command or a URL"),
        ({"tunnel": False}, "advertise"),
        ({"accept": "everybody"}, "accept"),
        ({"url": "ftp://x"}, "url"),
        ({"stability": "solid"}, "stability"),
        ({"price": "1.5"}, "price"),
    ],
)
def test_wrong_options_name_the_field(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        JoinSettings.read(options)


def test_errors_never_show_the_token() -> None:
    wrongs: tuple[tuple[str, object], ...] = (
        ("generic", True),
        ("tunnel", False),
        ("engine_key", "secret-key\n"),
    )
    for option, wrong in wrongs:
        with pytest.raises(InputError) as caught:
            JoinSettings.read({"fabric": "secret-token", option: wrong})
        assert "secret" not in str(caught.value)


def test_what_is_started(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert prepare(JoinOptions(), log) is None
    found = prepare(JoinOptions(command=("srv", "--listen", "{port}")), log)
    assert found is not None
    assert found.command is not None
    assert found.server.url == f"http://127.0.0.1:{found.command.arguments[2]}"
    assert found.command.surroundings() == {"PYTHONUNBUFFERED": "1"}
    assert 3 not in found.limits.fatal_codes
    # Atoll's own engine says by its code that starting it again is no use.
    stage = ("python", "-m", "atoll.deploy.commands.stage_node", "--port", "{port}")
    own = prepare(JoinOptions(command=stage), log)
    assert own is not None
    assert {2, 3, 127} <= set(own.limits.fatal_codes)
    remote = prepare(JoinOptions(url="http://h:1/v1"), log)
    assert remote is not None
    assert (remote.command, remote.server.url) == (None, "http://h:1")
