"""Steps that are launched before the tokens of the one before are read: the same tokens, and sooner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("torch", reason="needs the extra 'engine'")

import torch

from atoll.core.request_parameters import OutputFormat, SamplingParams
from atoll.engine import node_core
from atoll.engine.engine_messages import Hop, Message, Open, OpenBody, Release, Sampled, table_of
from atoll.engine.kv import BlockPool
from atoll.engine.model_stage import SequenceRows, StageOutput
from atoll.engine.node_core import CoreSettings, NodeCore
from atoll.engine.scheduler_core import GenerateRequest, SchedulerSettings
from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import LAYERS
from tests.engine.test_exact import PROMPTS, ask, check
from tests.seeds import examples

pytestmark = pytest.mark.engine

AHEAD = CoreSettings(token_budget=24, chunk=7, scheduling="async")
ENDS = (30, 45, 71)
"""Tokens that end answers: about half of those below have one, somewhere in the middle."""
LONGEST = 12


class EvenMatcher:
    """A guide that allows even tokens, and five of them."""

    def __init__(self) -> None:
        self._fed = 0

    @property
    def done(self) -> bool:
        return self._fed >= 5

    def feed(self, tokens: Sequence[int]) -> None:
        self._fed += len(tokens)

    def compute_allowed(self, size: int) -> NDArray[np.bool_]:
        allowed: NDArray[np.bool_] = np.arange(size) % 2 == 0
        return allowed


class EvenMatchers:
    def matcher(self, guide: OutputFormat) -> EvenMatcher:
        del guide
        return EvenMatcher()


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_p": 0.95},
    "narrow": {"temperature": 0.8, "top_k": 7, "min_p": 0.02},
    "guided": {"guide": OutputFormat(kind="regex", text="even")},
    "penalised": {"temperature": 1.3, "repetition_penalty": 1.2},
    "reported": {"logprobs": 2},
    "late": {"temperature": 1.0, "min_tokens": 4},
}


class Answers:
    """What each request is answered with alone, one step after another; every one is computed once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, str], list[int]] = {}

    def find(self, prompt: int, kind: str, count: int) -> list[int]:
        key = prompt, kind
        if key not in self._known:
            setups = [NodeSetup(0, 4)]
            cluster = Cluster(self._model.folder, LAYERS, setups, eos=ENDS, matchers=EvenMatchers())
            cluster.submit(request("alone", prompt, kind, LONGEST))
            cluster.run()
            self._known[key] = cluster.tokens("alone")
            if kind == "greedy":
                told = self._model.answer(PROMPTS[prompt], LONGEST)
                end = next((i for i, token in enumerate(told) if token in ENDS), LONGEST)
                assert self._known[key] == told[: end + 1]
        return self._known[key][:count]


def request(name: str, prompt: int, kind: str, count: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=count, seed=prompt, **KINDS[kind])
    return GenerateRequest(tuple(PROMPTS[prompt]), sampling, id=name)


@pytest.fixture(scope="module")
def answers(tiny: Callable[[str], Any]) -> Answers:
    return Answers(tiny("llama"))


@examples(6)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from((3, 6, 9, 11)),
            st.sampled_from(sorted(KINDS)) | st.sampled_from(("greedy", "drawn")),
            st.sampled_from((1, 2, 5, LONGEST)),
            st.integers(0, 12),
            st.none() | st.integers(1, 15),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 10_000),
    chunk=st.integers(1, 16),
    budget=st.integers(1, 32),
    blocks=st.sampled_from((12, 64)),
    sequences=st.sampled_from((None, 2)),
    caching=st.booleans(),
)
def test_tokens_are_those_of_one_step_after_another(
    tiny: Callable[[str], Any],
    answers: Answers,
    requests: list[tuple[int, str, int, int, int | None]],
    seed: int,
    chunk: int,
    budget: int,
    blocks: int,
    sequences: int | None,
    caching: bool,
) -> None:
    """Whatever comes when, ends how, gives way to others or is cancelled in the middle."""
    limits = CoreSettings(budget, chunk, sequences, scheduling="async")
    cluster = Cluster(
        tiny("llama").folder,
        LAYERS,
        [NodeSetup(0, 4, blocks=blocks, prefix_caching=caching, settings=limits)],
        seed=seed,
        eos=ENDS,
        # Full to the brim: the scheduler lets in what the node must then throw out again.
        settings=SchedulerSettings(kv_fill=2.0, dead_after_s=1.0, heartbeat_s=0.1, stall_s=1e9),
        matchers=EvenMatchers(),
    )
    cancelled: dict[int, str] = {}
    steps = 0
    for number, (prompt, kind, count, wait, cancel) in enumerate(requests):
        cluster.submit(request(f"r{number}", prompt, kind, count))
        if cancel is not None:
            cancelled[steps + cancel] = f"r{number}"
        for _ in range(wait):
            cluster.step()
            steps += 1
            cluster.scheduler.cancel(cancelled.get(steps, ""))
    cluster.run()
    cluster.settle()
    for number, (prompt, kind, count, _, _) in enumerate(requests):
        events, told = cluster.events[f"r{number}"], cluster.tokens(f"r{number}")
        whole = answers.find(prompt, kind, count)
        assert len(told) <= count
        if events[-1].finish_reason == "cancelled":
            assert told == whole[: len(told)]
        else:
            assert events[-1].error is None
            assert told == whole


def test_room_that_runs_out_costs_time_and_not_tokens(
    tiny: Callable[[str], Any], answers: Answers
) -> None:
    limits = SchedulerSettings(kv_fill=2.0, dead_after_s=1.0, heartbeat_s=0.1, stall_s=1e9)
    setups = [NodeSetup(0, 4, blocks=9, settings=AHEAD)]
    cluster = Cluster(tiny("llama").folder, LAYERS, setups, settings=limits, eos=ENDS, seed=2)
    for number in range(4):
        cluster.submit(request(f"r{number}", 5 + number, ("greedy", "drawn")[number % 2], 12))
    cluster.run()
    cluster.settle()
    for number in range(4):
        kind = ("greedy", "drawn")[number % 2]
        assert cluster.tokens(f"r{number}") == answers.find(5 + number, kind, 12)
    assert sum(core.preemptions for core in cluster.nodes.values()) > 0


def test_a_sequence_that_ends_leaves_what_it_would_have_left(tiny: Callable[[str], Any]) -> None:
    """The row too many is run and thrown away: neither its block nor its token is known to others."""
    model = tiny("llama")
    told = model.answer(PROMPTS[9], LONGEST)
    # At every place in a block an answer may end, by a token or because it is as long as it may be.
    for length in (3, 4, 5, 6):
        for eos in ((told[length - 1],), ()):
            found = {}
            for limits in (replace(AHEAD, scheduling="sync"), AHEAD):
                setups = [NodeSetup(0, 4, settings=limits)]
                cluster = Cluster(model.folder, LAYERS, setups, eos=eos)
                sampling = SamplingParams(max_tokens=LONGEST if eos else length)
                cluster.submit(GenerateRequest(tuple(PROMPTS[9]), sampling, id="r"))
                cluster.run()
                cluster.settle()
                (core,) = cluster.nodes.values()
                while core.step():
                    pass
                assert cluster.tokens("r") == told[:length]
                found[limits.scheduling] = set(core.pool._known), core.tokens
            assert found["async"][0] == found["sync"][0]
            assert found["async"][1] == found["sync"][1] + len(eos)


class Device:
    """A GPU in virtual time: work is queued, takes `step_s`, and the host waits only where it reads."""

    def __init__(self, step_s: float, launch_s: float) -> None:
        self.now_s = self.free_s = 0.0
        self.log: list[str] = []
        self.rows: list[list[SequenceRows]] = []
        self._step_s, self._launch_s = step_s, launch_s

    def work(self) -> None:
        self.now_s += self._launch_s
        self.free_s = max(self.now_s, self.free_s) + self._step_s

    def wait(self, until_s: float) -> None:
        self.now_s = max(self.now_s, until_s)


class QueuedStage:
    """All layers of a model that always says the token after the one it is given."""

    start, end, total, width, vocabulary = 0, 1, 1, 1, 50

    def __init__(self, device: Device) -> None:
        self.device = device
        self.chosen = torch.zeros(64, dtype=torch.int64)

    def forward(self, batch: Sequence[SequenceRows]) -> StageOutput:
        self.device.log.append(f"run {[each.position for each in batch]}")
        self.device.rows.append(list(batch))
        self.device.work()
        asked = tuple(i for i, each in enumerate(batch) if each.sample)
        logits = torch.zeros(len(asked), self.vocabulary)
        for row, i in enumerate(asked):
            each = batch[i]
            last = each.data[-1] if each.source is None else int(self.chosen[each.source])
            logits[row, last + 1] = 1.0
        return StageOutput((None,) * len(batch), logits if asked else None, asked)


class Lone:
    """A core with a queued stage, and what it told its scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, blocks: int = 64) -> None:
        device = self.device = Device(step_s=10e-3, launch_s=1e-3)

        class QueuedCopy:
            def __init__(self, tensor: torch.Tensor) -> None:
                self._tensor, self._done_s = tensor, device.free_s

            @property
            def is_here(self) -> bool:
                return device.now_s >= self._done_s

            def wait(self) -> torch.Tensor:
                device.wait(self._done_s)
                device.log.append(f"read {self._tensor.tolist()}")
                return self._tensor

        monkeypatch.setattr(node_core, "HostCopy", QueuedCopy)
        self.told: dict[int, list[int]] = {}
        self.other: list[Message] = []
        stage: Any = QueuedStage(device)
        self.core = NodeCore(
            "n",
            "mem://n",
            stage,
            BlockPool(blocks, 4),
            self._send,
            lambda: device.now_s,
            settings=CoreSettings(scheduling="async"),
            matchers=EvenMatchers(),  # type: ignore[arg-type]
        )

    def _send(self, to: str, message: Message) -> None:
        del to
        if isinstance(message, Sampled):
            for seq, _, _, token, _ in message.table.tolist():
                self.told.setdefault(seq, []).append(token)
        else:
            self.other.append(message)

    def open(
        self,
        seq: int,
        prompt: list[int],
        eos: tuple[int, ...] = (),
        *,
        epoch: int = 0,
        expects_kv: bool = False,
        **knobs: Any,
    ) -> None:
        sampling = SamplingParams(**knobs)
        body = OpenBody(
            seq=seq,
            epoch=epoch,
            route=(Hop(node="n", endpoint="mem://n", start=0, end=1),),
            prompt_length=len(prompt),
            max_length=len(prompt) + sampling.max_tokens,
            arrival=seq,
            reply_to="mem://s",
            sampling=sampling,
            eos=eos,
            expects_kv=expects_kv,
        )
        self.core.handle(Open(body, np.array(prompt, np.int64)))

    def release(self, seq: int) -> None:
        self.core.handle(Release(table_of([(seq, 0)], Release.columns)))

    def run(self) -> list[str]:
        while self.core.step():
            pass
        return self.device.log


def test_the_next_step_is_launched_before_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    lone.open(1, [3, 4], max_tokens=4)
    assert lone.run() == [
        *(
            "run [0]",
            "run [2]",
            "read [5]",
            "run [3]",
            "read [6]",
            "run [4]",
            "read [7]",
            "read [8]",
        )
    ], "and after the last token that may come nothing is run"
    assert lone.told == {1: [5, 6, 7, 8]}
    assert [rows[0].source for rows in lone.device.rows] == [None, 0, 0, 0]
    assert lone.core.idle


def test_the_row_after_an_end_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    lone.open(1, [3], eos=(5,), max_tokens=9)
    lone.open(2, [20], eos=(5,), max_tokens=4)
    assert lone.run() == [
        *("run [0, 0]", "run [1, 1]", "read [4, 21]", "run [2, 2]", "read [5, 22]"),
        *("run [3]", "read [6, 23]", "read [24]"),
    ]
    assert lone.told == {1: [4, 5], 2: [21, 22, 23, 24]}
    assert lone.core.pool.used == 0


def test_who_is_released_meanwhile_gets_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    lone.open(1, [3], max_tokens=9)
    lone.core.step()
    lone.core.step()
    lone.release(1)
    assert lone.core.idle
    assert lone.core.pool.used == 0
    # The same sequence under the next epoch is another one; of the old one a token is still on its way.
    lone.open(1, [30], epoch=1, max_tokens=2)
    lone.run()
    assert lone.told == {1: [4, 31, 32]}
    lone.open(2, [40], max_tokens=9)
    lone.core.step()
    lone.core.drop_all()
    lone.run()
    assert 2 not in lone.told
    assert lone.core.pool.used == 0


def test_nobody_gives_way_to_a_row_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all blocks taken, what the step before says is heard first: who ends gives blocks back."""
    lone = Lone(monkeypatch, blocks=3)
    lone.open(1, [1, 2, 3, 4], eos=(5,), max_tokens=9)
    lone.open(2, [11, 12, 13, 14, 15, 16, 17, 18], max_tokens=3)
    assert lone.run() == [
        *("run [0, 0]", "read [5, 19]", "run [8]", "run [9]", "read [20]", "read [21]")
    ]
    assert lone.told == {1: [5], 2: [19, 20, 21]}
    assert lone.other == []
    assert lone.core.pool.used == 0
    lone.open(3, [1, 2, 3, 4, 5, 6, 7, 8], eos=(9,), max_tokens=9)
    lone.core.step()
    # Room for KV that comes from elsewhere is made at once.
    lone.open(4, [1, 2, 3, 4, 5, 6, 7, 8], expects_kv=True)
    assert lone.told[3] == [9]
    assert [type(message).__name__ for message in lone.other] == ["Opened"]
    lone.core.drop_all()
    lone.core.pool.check()
    assert lone.core.pool.used == 0


def test_who_needs_the_host_waits_for_the_tokens_before(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    lone.open(1, [3], max_tokens=4)
    lone.core.step()
    lone.open(2, [21], guide=OutputFormat(kind="regex", text="even"), max_tokens=2)
    log = lone.run()
    # Both are in every step from then on, and each is read before the next is run; then one is alone again.
    assert log == [
        *("run [0]", "read [4]", "run [1, 0]", "run [2, 1]", "run [3]", "read [7]"),
    ]
    assert lone.told == {1: [4, 5, 6, 7], 2: [22, 0]}


def test_a_step_is_measured_as_long_as_the_device_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    lone.open(1, [3], max_tokens=20)
    lone.run()
    # The host's millisecond is paid once, before the first; sync would pay it with every step.
    assert lone.device.now_s == pytest.approx(20 * 10e-3 + 1e-3)
    assert lone.core.busy_s == pytest.approx(lone.device.now_s)
    assert (lone.core.steps, lone.core.tokens) == (20, 20)
    # After a pause the host's time is part of the step again.
    lone.device.now_s += 1.0
    lone.open(2, [3], max_tokens=1)
    lone.run()
    assert lone.core.busy_s == pytest.approx(21 * 10e-3 + 2e-3)


def test_a_device_that_waits_for_the_host_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone(monkeypatch)
    lone.device._step_s, lone.device._launch_s = 1e-3, 10e-3
    lone.open(1, [3], max_tokens=10)
    lone.run()
    assert lone.core.busy_s == pytest.approx(lone.device.now_s)
    assert lone.device.now_s < 10 * 11e-3


def test_no_more_tokens_stay_on_the_device_than_there_are_rows_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lone = Lone(monkeypatch)
    lone.core._chosen = torch.zeros(1, dtype=torch.int64)
    for seq in (1, 2):
        lone.open(seq, [10 * seq], max_tokens=2)
    assert lone.run() == ["run [0, 0]", "run [1, 1]"]
    assert lone.told == {1: [11, 12], 2: [21, 22]}


def test_ranks_go_step_by_step(tiny: Callable[[str], Any]) -> None:
    model = tiny("llama")
    cluster = Cluster(model.folder, LAYERS, [NodeSetup(0, 4, settings=AHEAD, tp=2)], seed=1)
    check(cluster, ask(cluster, [(4, 6, 2), (7, 5, 0)]), model)
