"""Announcements of a node to the fabric: decisions only.

    JOIN --well--> SERVING with services <--> SERVING without (not well, or leaving) --dead--> DOWN
                        ^                                                                        |
                        +------------------- a new session, once it is well again ---------------+

A session that said DOWN never serves again, so what comes after is a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.fabric.registry.records import SessionState
from atoll.runtime.join.offers import ServerOffer

TAKES_LABEL = "takes"
INSTANCES = "instances"
"""A node whose label TAKES_LABEL says so hosts instances for its fabric's operators."""


@dataclass(frozen=True, slots=True)
class NodeSituation:
    """How things stand. `offer` is what is served now, None if nothing is or it is not well.

    `dead`: the engine's process has ended. `idle`: there is no engine, and none is wanted until an
    assignment comes. `leaving`: nothing new is taken.
    """

    offer: ServerOffer | None = None
    dead: bool = False
    idle: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Announcement:
    """State and offer that others are told. A state lower than before begins a new session."""

    state: SessionState
    offer: ServerOffer | None


def choose_announcement(last: Announcement, now: NodeSituation) -> Announcement:
    """Return what to say, given what was said last; the same again means that nothing is to be said."""
    if now.leaving:
        # Whoever waits for an answer still gets it: the state stays, services go.
        return Announcement(last.state, None)
    if now.idle:
        return Announcement(SessionState.JOIN, None)
    if now.dead:
        # An engine that never served has not gone down: the node is still joining.
        return Announcement(
            SessionState.JOIN if last.state is SessionState.JOIN else SessionState.DOWN, None
        )
    if now.offer is not None:
        return Announcement(SessionState.SERVING, now.offer)
    # Not well: withdrawn, or not there yet.
    return Announcement(last.state, None)
