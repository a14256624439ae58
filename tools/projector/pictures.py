"""Scenes of flat shapes, and their pictures, drawn with torch alone: exact, seeded, anti-aliased."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.14, 0.14),
    "green": (0.14, 0.62, 0.22),
    "blue": (0.14, 0.30, 0.86),
    "yellow": (0.96, 0.86, 0.14),
    "orange": (0.97, 0.52, 0.08),
    "purple": (0.52, 0.18, 0.70),
    "black": (0.06, 0.06, 0.06),
    "white": (0.96, 0.96, 0.96),
}
HELD_OUT = frozenset(
    {
        ("purple", "square"),
        ("orange", "triangle"),
        ("green", "star"),
        ("blue", "cross"),
        ("yellow", "circle"),
    }
)
"""Pairs of colour and shape that no training picture or question ever shows."""
MAX_OBJECTS = 6
SIDE = 224
Rgb = tuple[float, float, float]
Pair = tuple[str, str]
_CONTRAST = 0.35
"""The least distance (in RGB of 0..1) between an object and what is behind it."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One shape. Centre (x right, y down) and radius are parts of the picture's side; angle in radians."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: Rgb


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows: things, on a background that goes from one colour to another."""

    things: tuple[Thing, ...]
    back: tuple[Rgb, Rgb]
    slope: float
    """The direction of the background's change, in radians."""
    grain: float
    """The spread of the noise on every pixel, in parts of full brightness."""
    seed: int

    def pairs(self) -> Counter[Pair]:
        """Return how often each pair of colour and shape is there."""
        return Counter((thing.colour, thing.shape) for thing in self.things)


def draw_scene(rng: Random, *, held_out: bool = False) -> Scene:
    """Return a random scene; with `held_out`, one that shows at least one held-out pair."""
    groups = rng.choices((1, 2, 3), (45, 40, 15))[0]
    allowed = [(c, s) for c in COLOURS for s in SHAPES if held_out or (c, s) not in HELD_OUT]
    pairs = rng.sample(allowed, groups)
    if held_out and not HELD_OUT.intersection(pairs):
        pairs[rng.randrange(groups)] = rng.choice(sorted(HELD_OUT))
    if groups == 1:
        counts = rng.choices((1, 2, 3, 4, 5), (40, 18, 16, 14, 12))
    else:
        counts = [rng.randint(1, 3 if groups == 2 else 2) for _ in pairs]
    named = [pair for pair, count in zip(pairs, counts, strict=True) for _ in range(count)]
    rng.shuffle(named)
    things = tuple(
        Thing(*pair, *place, _angle(rng, pair[1]), _shade(rng, COLOURS[pair[0]], 0.06))
        for pair, place in zip(named, _places(rng, len(named)), strict=True)
    )
    return Scene(things, _back(rng, things), rng.uniform(0, math.tau), rng.choice((0, 0.01, 0.04)),
                 rng.getrandbits(31))  # fmt: skip


def _places(rng: Random, count: int) -> list[tuple[float, float, float]]:
    """Return (x, y, radius) per thing: none overlap, and each centre is clearly in one ninth."""
    if count == 1:
        x, y = (rng.choice((1, 3, 5)) / 6 + rng.uniform(-0.06, 0.06) for _ in range(2))
        return [(x, y, rng.uniform(0.08, min(0.95 * min(x, y, 1 - x, 1 - y), 0.4)))]
    if count <= 4 and rng.random() < 0.4:
        cells, move, sizes = 2, 0.05, (0.08, 0.19)
    else:
        cells, move, sizes = 3, 0.03, (0.07, 0.13)
    alike = rng.uniform(*sizes) if rng.random() < 0.5 else None
    places = []
    for cell in rng.sample(range(cells * cells), count):
        x, y = ((2 * at + 1) / (2 * cells) for at in (cell % cells, cell // cells))
        places.append(
            (
                x + rng.uniform(-move, move),
                y + rng.uniform(-move, move),
                alike if alike is not None else rng.uniform(*sizes),
            )
        )
    return places


def _angle(rng: Random, shape: str) -> float:
    return rng.uniform(-0.2, 0.2) if shape in ("square", "triangle", "cross") else rng.uniform(0, 1)


def _shade(rng: Random, rgb: Rgb, spread: float) -> Rgb:
    r, g, b = (min(max(value + rng.uniform(-spread, spread), 0.0), 1.0) for value in rgb)
    return r, g, b


def _back(rng: Random, things: Sequence[Thing]) -> tuple[Rgb, Rgb]:
    for _ in range(30):
        way = rng.random()
        if way < 0.4:
            grey = rng.uniform(0.85, 1.0)
            first = _shade(rng, (grey, grey, grey), 0.02)
        elif way < 0.55:
            grey = rng.uniform(0.0, 0.2)
            first = _shade(rng, (grey, grey, grey), 0.02)
        else:
            grey = rng.uniform(0.25, 0.85)
            first = _shade(rng, (grey, grey, grey), 0.15)
        second = _shade(rng, first, 0.12) if rng.random() < 0.5 else first
        if all(math.dist(t.rgb, side) >= _CONTRAST for t in things for side in (first, second)):
            return first, second
    return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


def render(scenes: Sequence[Scene], device: str = "cpu", side: int = SIDE) -> Tensor:
    """Return the pictures as float [scenes, 3, side, side] of whole numbers in 0..255."""
    rows = []
    for scene in scenes:
        things = [
            (t.x, t.y, t.radius, t.angle, float(SHAPES.index(t.shape)), *t.rgb)
            for t in scene.things
        ]
        rows.append(things + [(0.0,) * 8] * (MAX_OBJECTS - len(things)))
    things_ = torch.tensor(rows, device=device)
    backs = torch.tensor([scene.back for scene in scenes], device=device)
    others = torch.tensor([(math.cos(s.slope), math.sin(s.slope), s.grain) for s in scenes],
                          device=device)  # fmt: skip
    axis = (torch.arange(side, device=device) + 0.5) / side
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    across = (x - 0.5) * others[:, 0, None, None] + (y - 0.5) * others[:, 1, None, None]
    mix = (across * 0.7 + 0.5).clamp(0, 1)[:, None]
    picture = backs[:, 0, :, None, None] * (1 - mix) + backs[:, 1, :, None, None] * mix
    for number in range(MAX_OBJECTS):
        thing = things_[:, number, :, None, None]
        cover = _cover(x, y, thing, side)[:, None]
        picture = picture * (1 - cover) + thing[:, 5:8] * cover
    seeds = torch.tensor([scene.seed for scene in scenes], device=device)
    noise = draw_noise(seeds, picture[0].numel()).view(picture.shape)
    return ((picture + noise * others[:, 2, None, None, None]) * 255).round().clamp(0, 255)


def draw_noise(seeds: Tensor, count: int) -> Tensor:
    """Return normal noise [seeds, count]: a function of seed and place, whatever else is drawn and where."""
    place = torch.arange(count, device=seeds.device)
    first = _scatter(seeds)[:, None]
    second = _scatter(first + 1)
    far = (_scatter(first ^ place) + 1).float() / 2**32
    turn = _scatter(second ^ place).float() / 2**32
    return (-2 * far.log()).sqrt() * (math.tau * turn).cos()


def _scatter(numbers: Tensor) -> Tensor:
    """Return 32 bits for each of 32 bits, one for one, that look unrelated: multiply and fold, twice."""
    for factor in (0x7FEB352D, 0x846CA68B):
        numbers = (numbers ^ (numbers >> 16)) * factor & 0xFFFFFFFF
    return numbers ^ (numbers >> 16)


def _cover(x: Tensor, y: Tensor, thing: Tensor, side: int) -> Tensor:
    """Return how much of each pixel a thing covers, from its signed distance to the edge."""
    radius = thing[:, 2].clamp_min(1e-6)
    cos, sin = thing[:, 3].cos(), thing[:, 3].sin()
    dx, dy = (x - thing[:, 0]) / radius, (y - thing[:, 1]) / radius
    u, v = dx * cos + dy * sin, dy * cos - dx * sin
    across, down = u.abs(), v.abs()
    far = (u * u + v * v).sqrt()
    circle = far - 0.95
    square = torch.maximum(across, down) - 0.82
    triangle = torch.maximum(v, across * math.sqrt(0.75) - v * 0.5) - 0.5
    bar = 0.32
    cross = torch.minimum(
        torch.maximum(across - 0.95, down - bar), torch.maximum(across - bar, down - 0.95)
    )
    fifth = math.tau / 5
    turn = (torch.atan2(u, -v) + fifth / 2).remainder(fifth) - fifth / 2
    inner = 0.42
    nx, ny = inner * math.sin(fifth / 2), 1 - inner * math.cos(fifth / 2)
    star = ((far * turn.cos() - 1) * nx + far * turn.abs().sin() * ny) / math.hypot(nx, ny)
    kinds = torch.stack([circle, square, triangle, star, cross])
    which = thing[:, 4].long()[None].expand(1, *far.shape)
    distance = kinds.gather(0, which)[0] * radius
    cover = (0.5 - distance * side).clamp(0, 1)
    return torch.where(thing[:, 2] > 0, cover, torch.zeros_like(cover))
