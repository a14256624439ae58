"""The same network with hypothesis at the wheel: it looks for the shortest history that breaks it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from atoll.fabric.registry.records import SessionState
from tests.fabric.registry.network import Network
from tests.seeds import examples

picks = st.integers(0, 1 << 16)
slots = st.sampled_from(("h1", "m001", "m002"))


class Federation(RuleBasedStateMachine):
    """h0 always lives; everything else may happen in any order."""

    @initialize(seed=picks)
    def begin(self, seed: int) -> None:
        self.net = Network(seed, skew_s=100.0)
        self.net.start("h0", SessionState.JOIN)

    @precondition(lambda self: len(self.net.living) < 6)
    @rule(slot=slots, state=st.sampled_from((SessionState.JOIN, SessionState.SERVING)))
    def start(self, slot: str, state: SessionState) -> None:
        self.net.start(slot, state)

    @precondition(lambda self: len(self.net.living) > 1)
    @rule(pick=picks, says_so=st.booleans())
    def stop(self, pick: int, says_so: bool) -> None:
        node = self.net.living[1:][pick % (len(self.net.living) - 1)]
        if says_so:
            self.net.leave(node)
        self.net.kill(node)

    @rule(pick=picks, state=st.sampled_from(SessionState), engine=st.sampled_from("ab"))
    def announce(self, pick: int, state: SessionState, engine: str) -> None:
        node = self.net.living[pick % len(self.net.living)]
        if state is SessionState.LEFT and node is self.net.nodes[0]:
            state = SessionState.DOWN
        self.net.announce(node, state, engine)

    @rule(seconds=st.sampled_from((0.05, 1.0, 20.0, 61.0, 4000.0)), pick=picks)
    def wait(self, seconds: float, pick: int) -> None:
        self.net.now_s += seconds
        self.net.tick(self.net.living[pick % len(self.net.living)])

    @rule(pick=picks, part=st.integers(0, 2))
    def move(self, pick: int, part: int) -> None:
        self.net.living[pick % len(self.net.living)].part = part

    @rule(pick=picks)
    def look(self, pick: int) -> None:
        self.net.look(self.net.living[pick % len(self.net.living)])

    @rule(asker=picks, peer=picks, lost_after=st.sampled_from((None, 0, 1)))
    def exchange(self, asker: int, peer: int, lost_after: int | None) -> None:
        living = self.net.living
        one, other = living[asker % len(living)], living[peer % len(living)]
        if one is not other:
            self.net.exchange(one, other, lost_after=lost_after)

    @precondition(lambda self: self.net.flying)
    @rule(pick=picks, fate=st.sampled_from(("deliver", "deliver", "repeat", "drop")))
    def fly(self, pick: int, fate: str) -> None:
        index = pick % len(self.net.flying)
        if fate == "drop":
            self.net.drop(index)
        else:
            self.net.deliver(index, keep=fate == "repeat")

    @rule(pick=picks, said=picks)
    def replay(self, pick: int, said: int) -> None:
        net = self.net
        net.replay(net.living[pick % len(net.living)], net.said[said % len(net.said)])

    def teardown(self) -> None:
        if hasattr(self, "net"):
            self.net.settle()


TestFederation = Federation.TestCase
TestFederation.settings = settings(examples(80), stateful_step_count=40)
