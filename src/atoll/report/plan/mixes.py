"""Which models answer the choices of a plan: shares, errors, and the ways that several share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.units import format_price, format_share
from atoll.plan.choice import ModelMix
from atoll.plan.plan import Plan
from atoll.plan.service_sharing import sharers_of
from atoll.report.plan.layout_svg import choose_colours
from atoll.report.render import Grid

_WIDTH = 720
_HEIGHT = 26
_LETTER = 7.0
"""Width of a letter in a drawing, in pixels, about."""


@dataclass(frozen=True)
class ShareBox:
    """A model's share of a choice, drawn; in pixels."""

    x: float
    width: float
    fill: str
    label: str
    title: str


@dataclass(frozen=True)
class MixDrawing:
    """The shares of a choice as one bar, with what is said of it."""

    name: str
    note: str
    boxes: Sequence[ShareBox]
    width: int = _WIDTH
    height: int = _HEIGHT


def _sharers(plan: Plan) -> dict[str, tuple[str, ...]]:
    return sharers_of({mix.name: tuple(mix.shares) for mix in plan.mixes})


def list_mixes(plan: Plan) -> Grid:
    """Return a row for each way that requests of a choice are answered, the largest share first."""
    shared = _sharers(plan)
    rows: list[tuple[object, ...]] = [
        (
            mix.name,
            mix.models[service],
            format_share(share),
            format_share(mix.errors[service]) if _errs(mix) and service in mix.errors else None,
            service,
            ", ".join(name for name in shared.get(service, ()) if name != mix.name) or None,
        )
        for mix in plan.mixes
        for service, share in sorted(mix.shares.items(), key=lambda item: (-item[1], item[0]))
    ]
    columns = ["choice", "model", "share", "errs", "service", "shared with"]
    if not shared:
        columns.pop()
        rows = [row[:-1] for row in rows]
    return Grid(columns, rows, ("share", "errs"))


def _errs(mix: ModelMix) -> bool:
    """Whether anybody said how often its models err."""
    return mix.max_error is not None or any(mix.errors.values())


def describe_mix(mix: ModelMix) -> str | None:
    """Say how often answers err, what is allowed, and what more would save; None where nothing errs."""
    alike = len(set(mix.models.values())) == 1
    if not _errs(mix) or (alike and mix.max_error is None):
        return None
    text = f"{format_share(mix.error)} of the answers err on average"
    if mix.max_error is not None:
        text += f", {format_share(mix.max_error)} may"
    if mix.usd_per_point is not None and mix.max_error is not None:
        saved = max(0.0, mix.usd_per_point)
        text += f"; one point more would save about {format_price(saved)}"
    return text


def describe_mixes(plan: Plan) -> list[str]:
    """Return a sentence for each choice that something is to be said of."""
    said = [(mix.name, describe_mix(mix)) for mix in plan.mixes]
    return [f"{name}: {text}." for name, text in said if text is not None]


def draw_mixes(plan: Plan) -> list[MixDrawing]:
    """Return the shares of each choice by model as a bar."""
    colours = choose_colours(model for mix in plan.mixes for model in mix.models.values())
    drawings = []
    for mix in plan.mixes:
        shares = mix.model_shares
        total = sum(shares.values()) or 1.0
        boxes, at = [], 0.0
        for model, share in sorted(shares.items(), key=lambda item: (-item[1], item[0])):
            width = _WIDTH * share / total
            text = f"{model} {format_share(share)}"
            label = next((t for t in (text, format_share(share)) if _fits(t, width)), "")
            boxes.append(ShareBox(at, width, colours[model], label, text))
            at += width
        drawings.append(MixDrawing(mix.name, describe_mix(mix) or "", boxes))
    return drawings


def _fits(text: str, width: float) -> bool:
    return _LETTER * len(text) + 8.0 <= width
