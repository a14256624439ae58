"""Request classes: what requests of any-to-any models bring, what they want, and what they are promised.

A class is named by what it brings and wants: "text", "image+text", "image+audio -> audio", and a label in
brackets where two bring the same: "image+text (scans)". Text is wanted where nothing else is said, and
text comes with everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from atoll.core.errors import InputError
from atoll.core.frozen import Frozen, without_blanks
from atoll.workload.lengths import LengthMix

Modality = Literal["text", "image", "video", "audio"]
Brought = tuple[tuple[Modality, ...], tuple[Modality, ...]]
"""Modalities that a request brings and wants, in the order of `parse_class_name`."""
INPUTS: tuple[Modality, ...] = ("text", "image", "video", "audio")
OUTPUTS: tuple[Modality, ...] = ("text", "audio", "image")
MAX_PIXELS = 16_384
_LONGEST = 120
"""Characters of the longest name."""
_NAME = re.compile(r"([a-z+ ]+?)(?:\s*->\s*([a-z+ ]+?))?(?:\s*\(([A-Za-z0-9 ._-]{1,64})\))?")

Pixels = Annotated[int, Field(ge=1, le=MAX_PIXELS)]
Count = Annotated[float, Field(gt=0, le=1000)]
Tokens = Annotated[float, Field(ge=1, le=1e7)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Spread = Annotated[float, Field(ge=0, le=20)]


class Images(Frozen):
    """Images that a request brings: how many on average, and of which size."""

    count: Count = 1.0
    width_px: Pixels = 1280
    height_px: Pixels = 720


class Video(Frozen):
    """A video that a request brings, as the frames that are looked at."""

    frames: Annotated[int, Field(ge=1, le=100_000)] = 16
    width_px: Pixels = 640
    height_px: Pixels = 360


class ImageOutput(Frozen):
    """Images that a request wants, in steps of denoising, twice each where `guided` (without prompt, too)."""

    count: Count = 1.0
    width_px: Pixels = 1024
    height_px: Pixels = 1024
    steps: Annotated[int, Field(ge=1, le=1000)] = 20
    guided: bool = False


class RequestClass(Frozen):
    """Requests that take the same way through a model.

    `share` is its share of the service's requests. `input_tokens` and `output_tokens` are text alone, means,
    with `input_cv` and `output_cv` the standard deviations over them; tokens of media come on top. `audio_s`
    are seconds of sound that a request brings, `speech_s` those that it wants. A sentence of the answer has
    `sentence_tokens`, usual ones where it is None: some voices begin with the first. Promises, None where
    there is none: `ttft_s` seconds until the first text, `tpot_s` per further token, `ahead_s` by how much
    speech is complete before a listener who starts with its first second needs its last, `image_s` until the
    image. `attainment` is the share of its requests that must keep them all, None where it is the service's.
    """

    name: str = Field(min_length=1, max_length=_LONGEST)
    share: float = Field(gt=0, le=1)
    input_tokens: Tokens = 300.0
    output_tokens: Tokens = 150.0
    input_cv: Spread = 0.0
    output_cv: Spread = 0.0
    images: Images | None = None
    video: Video | None = None
    audio_s: Seconds | None = None
    speech_s: Seconds | None = None
    sentence_tokens: Tokens | None = None
    image_output: ImageOutput | None = None
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    ahead_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    image_s: Seconds | None = None
    attainment: Annotated[float, Field(gt=0, lt=1)] | None = None

    # Older problems keep their hash.
    _without_blanks = without_blanks("attainment", "sentence_tokens")

    @property
    def text_mix(self) -> LengthMix:
        """Lengths of its text alone."""
        return LengthMix(
            self.input_tokens,
            self.output_tokens,
            self.input_tokens**2 * (1.0 + self.input_cv**2),
            self.output_tokens**2 * (1.0 + self.output_cv**2),
        )

    @property
    def is_promised(self) -> bool:
        """Whether anything is promised."""
        promises = (self.ttft_s, self.tpot_s, self.ahead_s, self.image_s)
        return any(promise is not None for promise in promises)

    @model_validator(mode="after")
    def _is_what_it_is_called(self) -> Self:
        try:
            brings, wants = parse_class_name(self.name)
        except InputError as error:
            raise _refuse(error.message, error.hint) from error
        for modality, given in self._sizes_in.items():
            if (modality in brings) != given:
                raise _refuse(
                    f"class '{self.name}' and its sizes disagree on {modality} that it brings",
                    f"name what it brings before '->', as in {modality}+text, and give its size",
                )
        for modality, given in self._sizes_out.items():
            if (modality in wants) != given:
                raise _refuse(
                    f"class '{self.name}' and its sizes disagree on {modality} that it wants",
                    f"name what it wants after '->', as in text -> {modality}, and give its size",
                )
        if self.ahead_s is not None and self.speech_s is None:
            raise _refuse("speech is promised where none is wanted", "leave 'ahead' out")
        if self.ahead_s is not None and self.speech_s is not None and self.ahead_s >= self.speech_s:
            raise _refuse(
                f"{self.speech_s:g} s of speech cannot be {self.ahead_s:g} s ahead of a listener",
                "promise less than the speech is long",
            )
        if self.image_s is not None and self.image_output is None:
            raise _refuse("an image is promised where none is wanted", "leave 'image_within' out")
        return self

    @property
    def _sizes_in(self) -> dict[Modality, bool]:
        return {
            "image": self.images is not None,
            "video": self.video is not None,
            "audio": self.audio_s is not None,
        }

    @property
    def _sizes_out(self) -> dict[Modality, bool]:
        return {"audio": self.speech_s is not None, "image": self.image_output is not None}


def parse_class_name(name: str) -> tuple[tuple[Modality, ...], tuple[Modality, ...]]:
    """Return what requests of a class bring and what they want, each in a fixed order.

    >>> parse_class_name("image+audio -> audio")
    (('text', 'image', 'audio'), ('text', 'audio'))
    """
    # Names are short (`RequestClass`): a long one is not worth a search.
    match = _NAME.fullmatch(name) if len(name) <= _LONGEST and name == name.strip() else None
    known = f"({', '.join(INPUTS)}) -> what it wants ({', '.join(OUTPUTS)})"
    hint = f"write what it brings {known}, as in image+text"
    if match is None:
        raise InputError(f"'{name[:60]}' is no class of requests", field="classes", hint=hint)
    brings = {word.strip() for word in match[1].split("+")} | {"text"}
    wants = {word.strip() for word in (match[2] or "text").split("+")}
    wants |= {"text"} if "image" not in wants else set()
    for found, possible, do in ((brings, INPUTS, "bring"), (wants, OUTPUTS, "want")):
        unknown = sorted(found - set(possible))
        if unknown:
            raise InputError(
                f"'{unknown[0]}' in class '{name[:60]}' is nothing that requests {do}",
                field="classes",
                hint=hint,
            )
    return (
        tuple(m for m in INPUTS if m in brings),
        tuple(m for m in OUTPUTS if m in wants),
    )


def write_class_name(brings: Sequence[Modality], wants: Sequence[Modality]) -> str:
    """Return a class name that says what requests bring and want.

    >>> write_class_name(("text", "audio"), ("text", "audio"))
    'text+audio -> text+audio'
    """
    given = "+".join(brings)
    return given if tuple(wants) == ("text",) else f"{given} -> {'+'.join(wants)}"


def match_class(brought: Brought, known: Iterable[Brought]) -> Brought | None:
    """Return what requests of the class bring and want that one belongs to, None where none will do.

    It is the class that brings and wants the same, else the smallest that has all of it.
    """
    wide = [
        klass
        for klass in known
        if set(brought[0]) <= set(klass[0]) and set(brought[1]) <= set(klass[1])
    ]
    # The smallest that fits; of several always the same one.
    return min(wide, key=lambda klass: (len(klass[0]) + len(klass[1]), klass), default=None)


def _refuse(message: str, hint: str | None) -> PydanticCustomError:
    return PydanticCustomError("quantity", "{message}", {"message": message, "hint": hint})
