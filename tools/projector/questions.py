"""Questions about a scene, with answers: several phrasings per kind, the last of each kept from training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tools.projector.pictures import COLOURS, HELD_OUT, SHAPES, Pair, Scene, Thing

NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and the word of the answer that matters."""

    kind: str
    text: str
    answer: str
    key: str


@dataclass(frozen=True, slots=True)
class Asker:
    """How to ask: `new` takes the phrasing that training never sees, `held_out` may name held-out pairs."""

    rng: Random
    new: bool = False
    held_out: bool = False

    def phrase(self, *phrasings: str) -> str:
        """Return one phrasing."""
        return phrasings[-1] if self.new else self.rng.choice(phrasings[:-1])


def _plural(shape: str) -> str:
    return "crosses" if shape == "cross" else f"{shape}s"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _counted(count: int, colour: str, shape: str) -> str:
    if count == 1:
        return f"{_article(colour)} {colour} {shape}"
    return f"{NUMBERS[count]} {colour} {_plural(shape)}"


def ask_colour(scene: Scene, asker: Asker) -> Question | None:
    """Ask for the colour of a shape that is there in one colour."""
    pairs = scene.pairs()
    shapes = Counter(shape for _, shape in pairs)
    fits = [pair for pair in pairs if shapes[pair[1]] == 1]
    if not fits:
        return None
    colour, shape = asker.rng.choice(fits)
    if pairs[colour, shape] > 1:
        many = _plural(shape)
        text = asker.phrase(
            f"What colour are the {many}?",
            f"What color are the {many}?",
            f"What is the colour of the {many}?",
            f"Which color do the {many} have?",
        )
        return Question("colour", text, f"The {many} are {colour}.", colour)
    if len(scene.things) == 1 and not asker.new and asker.rng.random() < 0.3:
        text = asker.rng.choice(("What colour is it?", "What color is it?", "What colour is this?"))
        return Question("colour", text, f"It is {colour}.", colour)
    text = asker.phrase(
        f"What colour is the {shape}?",
        f"What color is the {shape}?",
        f"What is the color of the {shape}?",
        f"what colour is the {shape}",
        f"Tell me the colour of the {shape}.",
        f"Which color does the {shape} have?",
    )
    return Question("colour", text, f"The {shape} is {colour}.", colour)


def ask_shape(scene: Scene, asker: Asker) -> Question | None:
    """Ask for the shape of what is there in one colour."""
    pairs = scene.pairs()
    colours = Counter(colour for colour, _ in pairs)
    fits = [pair for pair in pairs if colours[pair[0]] == 1]
    if not fits:
        return None
    colour, shape = asker.rng.choice(fits)
    if pairs[colour, shape] > 1:
        text = asker.phrase(
            f"What shape are the {colour} objects?",
            f"What are the {colour} things?",
            f"Which shape do the {colour} objects have?",
        )
        return Question("shape", text, f"They are {_plural(shape)}.", shape)
    if len(scene.things) == 1 and asker.rng.random() < 0.4:
        text = asker.phrase(
            "What shape is it?",
            "What shape is this?",
            "What is the shape?",
            "Which shape do you see?",
        )
    else:
        text = asker.phrase(
            f"What shape is the {colour} object?",
            f"What shape is the {colour} thing?",
            f"What is the {colour} object?",
            f"what shape is {colour}",
            f"Which shape does the {colour} object have?",
        )
    return Question("shape", text, f"It is {_article(shape)} {shape}.", shape)


def ask_count(scene: Scene, asker: Asker) -> Question | None:
    """Ask how many there are: of a shape, of a colour, of both, or of all."""
    rng = asker.rng
    way = rng.random()
    pairs = scene.pairs()
    if way < 0.6:
        shape = rng.choice(SHAPES) if rng.random() < 0.15 else rng.choice(sorted(pairs))[1]
        count = sum(thing.shape == shape for thing in scene.things)
        one, many = shape, _plural(shape)
    elif way < 0.75:
        colour = rng.choice(list(COLOURS)) if rng.random() < 0.15 else rng.choice(sorted(pairs))[0]
        count = sum(thing.colour == colour for thing in scene.things)
        one, many = f"{colour} shape", f"{colour} shapes"
    elif way < 0.85:
        pair = rng.choice(sorted(pairs))
        count = pairs[pair]
        one, many = f"{pair[0]} {pair[1]}", f"{pair[0]} {_plural(pair[1])}"
    else:
        count = len(scene.things)
        one, many = rng.choice((("shape", "shapes"), ("object", "objects")))
    text = asker.phrase(
        f"How many {many} are there?",
        f"How many {many} are in the picture?",
        f"How many {many} do you see?",
        f"how many {many}",
        f"Count the {many}.",
        f"What is the number of {many} in this image?",
    )
    answer = f"There is one {one}." if count == 1 else f"There are {NUMBERS[count]} {many}."
    return Question("count", text, answer, NUMBERS[count])


def place_of(thing: Thing) -> str:
    """Return where a thing is, by ninths of the picture."""
    row, column = ROWS[min(int(thing.y * 3), 2)], COLUMNS[min(int(thing.x * 3), 2)]
    if (row, column) == ("middle", "centre"):
        return "in the centre"
    if row == "middle":
        return f"on the {column}"
    return f"at the {row}" if column == "centre" else f"at the {row} {column}"


def ask_place(scene: Scene, asker: Asker) -> Question | None:
    """Ask where something is that is there once."""
    pairs = scene.pairs()
    fits = [thing for thing in scene.things if pairs[thing.colour, thing.shape] == 1]
    if not fits:
        return None
    thing = asker.rng.choice(fits)
    name = f"{thing.colour} {thing.shape}"
    if sum(other.shape == thing.shape for other in scene.things) == 1 and asker.rng.random() < 0.4:
        name = thing.shape
    text = asker.phrase(
        f"Where is the {name}?",
        f"In which part of the picture is the {name}?",
        f"where is the {name}",
        f"Can you tell me where the {name} is?",
    )
    place = place_of(thing)
    return Question("position", text, f"The {name} is {place}.", place)


def ask_whether(scene: Scene, asker: Asker) -> Question | None:
    """Ask whether a pair is there; half of the times it is not, though its parts may be."""
    rng = asker.rng
    pairs = scene.pairs()
    there = rng.random() < 0.5
    if there:
        colour, shape = rng.choice(sorted(pairs))
    else:
        absent = _absent(pairs, asker)
        near = [p for p in absent if any(p[0] == c or p[1] == s for c, s in pairs)]
        colour, shape = rng.choice(near if near and rng.random() < 0.7 else absent)
    name = f"{_article(colour)} {colour} {shape}"
    text = asker.phrase(
        f"Is there {name}?",
        f"Is there {name} in the picture?",
        f"Do you see {name}?",
        f"Does the picture show {name}?",
        f"Can you see {name} here?",
    )
    answer = f"Yes, there is {name}." if there else f"No, there is no {colour} {shape}."
    return Question("yes/no", text, answer, "yes" if there else "no")


def _absent(pairs: Counter[Pair], asker: Asker) -> list[Pair]:
    return [
        (colour, shape)
        for colour in COLOURS
        for shape in SHAPES
        if (colour, shape) not in pairs and (asker.held_out or (colour, shape) not in HELD_OUT)
    ]


def describe(scene: Scene) -> str:
    """Return the caption: the groups in the order of SHAPES, then of COLOURS."""
    colours = list(COLOURS)
    pairs = sorted(scene.pairs(), key=lambda pair: (SHAPES.index(pair[1]), colours.index(pair[0])))
    parts = [_counted(scene.pairs()[pair], *pair) for pair in pairs]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{text[0].upper()}{text[1:]}."


def ask_caption(scene: Scene, asker: Asker) -> Question | None:
    """Ask for a description."""
    text = asker.phrase(
        "Describe the picture.",
        "Describe the image.",
        "What do you see?",
        "What is in the picture?",
        "What does the image show?",
        "describe this image",
        "What can be seen in this picture?",
    )
    caption = describe(scene)
    return Question("caption", text, caption, caption)


ASKERS: dict[str, tuple[Callable[[Scene, Asker], Question | None], int]] = {
    "colour": (ask_colour, 18),
    "shape": (ask_shape, 15),
    "count": (ask_count, 26),
    "position": (ask_place, 13),
    "yes/no": (ask_whether, 14),
    "caption": (ask_caption, 14),
}
"""The kinds of questions, and how often each is drawn."""


def ask(scene: Scene, asker: Asker, kinds: Sequence[str] = tuple(ASKERS)) -> Question:
    """Return one question of a random kind that fits the scene."""
    while True:
        kind = asker.rng.choices(kinds, [ASKERS[kind][1] for kind in kinds])[0]
        question = ASKERS[kind][0](scene, asker)
        if question is not None:
            return question


def is_right(question: Question, answer: str) -> bool:
    """Say whether an answer in any words names the key, and nothing that contradicts it."""
    words = answer.lower().replace(".", " ").replace(",", " ").split()
    if question.kind == "caption":
        return answer.strip() == question.answer
    if question.kind == "position":
        named = {word for word in (*ROWS, *COLUMNS, "center") if word in words}
        return named == {word for word in (*ROWS, *COLUMNS) if word in question.key.split()}
    if question.kind == "yes/no":
        return bool(words) and words[0] == question.key
    if question.kind == "colour":
        return {word for word in COLOURS if word in words} == {question.key}
    if question.kind == "shape":
        return {s for s in SHAPES if s in words or _plural(s) in words} == {question.key}
    numbers = {word for word in NUMBERS if word in words}
    numbers |= {NUMBERS[int(w)] for w in words if w.isdigit() and int(w) < len(NUMBERS)}
    return numbers == {question.key}
