"""Schema of classes of requests in a fleet file: inputs, outputs and promises."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, StrictStr, Tag
from pydantic_core import PydanticCustomError

from atoll.core.frozen import Frozen
from atoll.core.quantities import Duration
from atoll.plan.files.schema_fields import (
    FirstToken,
    NextToken,
    Number,
    Share,
    Spoken,
    text_or_mapping,
)
from atoll.workload.classes import MAX_PIXELS

Tokens = Annotated[float, Field(strict=True, ge=1, le=1e7)]


def _size(value: object) -> object:
    """Read "1280x720" as width and height."""
    if isinstance(value, str):
        wide, x, high = value.strip().partition("x")
        # ASCII first: isdigit() alone also holds for what int() refuses.
        if x and value.isascii() and wide.isdigit() and high.isdigit() and len(value) < 16:
            return (int(wide), int(high))
    elif isinstance(value, tuple):
        return value
    raise PydanticCustomError(
        "quantity",
        "{message}",
        {
            "message": f"cannot read {value!r} as a size in pixels",
            "hint": "write WIDTHxHEIGHT, as in 1280x720",
        },
    )


PixelSize = Annotated[
    tuple[
        Annotated[int, Field(ge=1, le=MAX_PIXELS)],
        Annotated[int, Field(ge=1, le=MAX_PIXELS)],
    ],
    BeforeValidator(_size, json_schema_input_type=str),
]


class ImagesSpec(Frozen):
    """Images that a request brings."""

    count: Annotated[float, Field(strict=True, gt=0, le=1000)] = Field(
        default=1.0, description="How many on average."
    )
    size: PixelSize = Field(default=(1280, 720), description="Width x height in pixels.")


class VideoSpec(Frozen):
    """A video that a request brings."""

    frames: Annotated[int, Field(strict=True, ge=1, le=100_000)] = Field(
        default=16, description="Frames of it that are looked at."
    )
    size: PixelSize = Field(default=(640, 360), description="Width x height in pixels.")


class ImageSpec(Frozen):
    """Images that a request wants."""

    count: Annotated[float, Field(strict=True, gt=0, le=1000)] = Field(
        default=1.0, description="How many on average."
    )
    size: PixelSize = Field(default=(1024, 1024), description="Width x height in pixels.")
    steps: Annotated[int, Field(strict=True, ge=1, le=1000)] = Field(
        default=20, description="Steps of denoising."
    )
    guided: StrictBool = Field(
        default=False, description="Whether every step runs twice, with and without the prompt."
    )


class RequestClassSpec(Frozen):
    """Requests that bring and want the same; the key says what, as in image+audio -> audio."""

    share: Annotated[Share, Field(gt=0)] = Field(
        description="Its share of the requests, such as 30%."
    )
    input: Tokens = Field(
        default=300.0, description="Mean length of the text it brings, in tokens."
    )
    output: Tokens = Field(default=150.0, description="Mean length of the text answer, in tokens.")
    input_cv: Annotated[Number, Field(le=20)] = Field(
        default=0.0, description="Standard deviation of the first over its mean."
    )
    output_cv: Annotated[Number, Field(le=20)] = Field(
        default=0.0, description="The same of the answer."
    )
    images: ImagesSpec | None = Field(default=None, description="Images it brings.")
    video: VideoSpec | None = Field(default=None, description="A video it brings.")
    audio: Spoken | None = Field(default=None, description="Sound it brings, such as 10s.")
    speech: Spoken | None = Field(default=None, description="Speech it wants, such as 10s.")
    sentence: Tokens | None = Field(
        default=None,
        description="Mean length of a sentence that is spoken, in tokens: some voices begin with the first.",
    )
    image: ImageSpec | None = Field(default=None, description="Images it wants.")
    ttft: FirstToken | None = Field(
        default=None, description="Promised time to the first text; the service's if left out."
    )
    tpot: NextToken | None = Field(
        default=None, description="Promised time per further token; the service's if left out."
    )
    ahead: Annotated[Duration, Field(le=3600)] | None = Field(
        default=None,
        description="How long before a listener, who starts with its first second, needs the last of the "
        "speech it is complete.",
    )
    image_within: Spoken | None = Field(default=None, description="Promised time to the image.")
    attainment: Annotated[Share, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share of its requests that must keep its promises; the service's if left out.",
    )


ClassesField = Annotated[
    Annotated[StrictStr, Tag("text")]
    | Annotated[
        dict[StrictStr, RequestClassSpec], Field(min_length=1, max_length=64), Tag("mapping")
    ],
    Discriminator(text_or_mapping),
]
