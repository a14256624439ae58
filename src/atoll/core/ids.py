"""Names of things: node types ("L40S:2"), roles ("qwen3-32b/llm/decode"), phases."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from atoll.core.errors import InputError, shorten

_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?: [A-Za-z0-9._-]+)*(?:/[2-8])?")
_COUNT = re.compile(r"[1-9][0-9]{0,4}")
MAX_LETTERS = 200
"""Characters of a name, at most."""


class Phase(StrEnum):
    """Part of a request that a component computes. An llm runs PREFILL and DECODE apart or as BOTH.

    SERVE is an executor's: it runs parts of an any-to-any model, whatever they are.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    ENCODE = "encode"
    GENERATE = "generate"
    SERVE = "serve"


def slug(name: str, *, field: str | None = None) -> str:
    """Return `name` if it is a valid name, else raise InputError.

    Names hold letters, digits, `.`, `_`, `-`, and `/` between non-empty parts, and every part
    starts with a letter or digit, so that a name is also a safe relative path and URL segment.
    """
    if len(name) > MAX_LETTERS:
        raise InputError(
            f"a name has at most {MAX_LETTERS} characters", hint="shorten it", field=field
        )
    if _SLUG.fullmatch(name) is None:
        raise InputError(
            f"{name!r} is not a valid name",
            field=field,
            hint="use letters, digits, '.', '_', '-' and '/' between parts, like qwen3-32b",
        )
    return name


class NodeTypeId(NamedTuple):
    """One machine with `gpu_count` GPUs of one type; written "L40S:2".

    A GPU that is offered in equal shares is as many GPUs of a type of their own: one H200 in two shares is
    "H200/2:2".
    """

    gpu: str
    gpu_count: int

    def __str__(self) -> str:
        return f"{self.gpu}:{self.gpu_count}"

    @property
    def whole_gpu(self) -> str:
        """The type of the GPUs that are there: "H200" for shares of it."""
        return self.gpu.partition("/")[0]

    @property
    def shares(self) -> int:
        """Of how many equal shares of a GPU each one is: 2 for "H200/2", 1 for whole GPUs."""
        return int(self.gpu.partition("/")[2] or 1)

    @property
    def whole(self) -> NodeTypeId:
        """The machine with its GPUs as they are there: "H200:1" for "H200/2:2"."""
        return NodeTypeId(self.whole_gpu, -(-self.gpu_count // self.shares))

    def in_shares(self, shares: int) -> NodeTypeId:
        """Return the machine with each of its GPUs in so many equal shares."""
        return NodeTypeId(f"{self.gpu}/{shares}", self.gpu_count * shares)


@lru_cache(maxsize=4096)
def parse_node_type(text: str, *, field: str | None = None) -> NodeTypeId:
    """Read "L40S:2" into ("L40S", 2); "L40S" alone means one GPU. Does not look the GPU type up."""
    gpu, colon, count = text.strip().partition(":")
    if (
        len(text) > MAX_LETTERS
        or _GPU.fullmatch(gpu) is None
        or (colon and _COUNT.fullmatch(count) is None)
    ):
        raise InputError(
            f"{shorten(text)!r} is not a node type",
            field=field,
            hint="write GPU:COUNT with a count of 1 or more, like L40S:2",
        )
    return NodeTypeId(gpu, int(count) if colon else 1)


def format_node_type(gpu: str, gpu_count: int) -> str:
    """Write a node type as "GPU:COUNT"; the inverse of `parse_node_type`."""
    return str(NodeTypeId(gpu, gpu_count))


class RoleId(NamedTuple):
    """A phase of a component of a model, "model/component/phase": the unit that is placed.

    Executors run several parts that share a device: "model/vision+llm/serve".
    """

    model: str
    component: str
    phase: Phase

    def __str__(self) -> str:
        return f"{self.model}/{self.component}/{self.phase}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model that run, in order."""
        return tuple(self.component.split("+"))


@lru_cache(maxsize=4096)
def parse_role(text: str, *, field: str | None = None) -> RoleId:
    """Read "qwen3-32b/llm/decode"; the model part may itself hold slashes ("org/name")."""
    parts = text.strip().rsplit("/", 2)
    if len(parts) != 3:
        raise InputError(
            f"{text!r} is not a role",
            field=field,
            hint="write MODEL/COMPONENT/PHASE, like qwen3-32b/llm/decode",
        )
    model, component, phase = parts
    try:
        known_phase = Phase(phase)
    except ValueError:
        raise InputError(
            f"{phase!r} in role {text!r} is not a phase",
            field=field,
            hint="use one of " + ", ".join(Phase),
        ) from None
    for part in component.split("+"):
        slug(part, field=field)
    if "+" in component and known_phase is not Phase.SERVE:
        raise InputError(f"role {text!r} has several parts", field=field, hint="end it in /serve")
    return RoleId(slug(model, field=field), component, known_phase)
