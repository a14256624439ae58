"""Labels that an instance carries on every target, so that whoever asks later finds out what runs and why."""

from __future__ import annotations

from atoll.core.frozen import Frozen


class Labels(Frozen):
    """Labels that an instance carries on every target.

    `fleet` names the fleet it belongs to, `instance` is its id, unique in that fleet and never used again,
    `plan` the hash of the plan that asked for it, `placement` that of its layout, and `term` the term of the
    controller that started it: a deployer refuses orders of an older one.
    """

    fleet: str
    instance: str
    plan: str
    placement: str
    service: str
    role: str
    term: int = 0
