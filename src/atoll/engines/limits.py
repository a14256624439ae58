"""Limits that an engine is started with, and the host time of its steps."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar, get_args

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from atoll.core.frozen import Frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Num = TypeVar("Num", float, NDArray[np.float64])

BOOKED_SHARE = 0.95
"""Share of its KV cache that a node books at most: planned with, simulated with and routed by."""
MIXED_TOKENS = 2048
"""Tokens of a step where prompts and decoding share it, unless a limit is set: more would hold up decoding.
Engines are started with it."""
Scheduling = Literal["sync", "async"]
Handover = Literal["prefill", "decode", "prefill-push", "decode-push"]
GuessMethod = Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"]
GUESS_METHODS: frozenset[GuessMethod] = frozenset(get_args(GuessMethod))
MAX_GUESSES = 16
"""Tokens that are guessed ahead at most."""
_HostSeconds = Annotated[float, Field(ge=0, le=10)]


class HostTime(Frozen):
    """Host seconds of a step: so many for the step, and so many for every sequence in it.

    The host schedules, launches, samples and detokenises, however many GPUs split a layer.
    """

    step_s: _HostSeconds = 0.0
    sequence_s: _HostSeconds = 0.0

    def seconds(self, sequences: Num) -> Num:
        """Return the host seconds of a step with so many sequences, prompts and answers alike."""
        return self.step_s + self.sequence_s * sequences

    def scale(self, factor: float) -> HostTime:
        """Return a host that takes so many times as long."""
        return HostTime.model_construct(
            step_s=self.step_s * factor, sequence_s=self.sequence_s * factor
        )


def _refuse(message: str, hint: str) -> PydanticCustomError:
    return PydanticCustomError("quantity", "{message}", {"message": message, "hint": hint})


class Speculation(Frozen):
    """Speculative decoding, in the words of vLLM's `--speculative-config`.

    Each step checks `num_speculative_tokens` tokens that were guessed for every sequence. `acceptance` is the
    share of steps in which so many guesses or more were right, one figure a position, as vLLM logs it
    ("Per-position acceptance rate"); none where nobody plans with it. `model` are the weights of an EAGLE
    head, by their source, or a small model of the catalog for `draft_model`.
    """

    method: GuessMethod
    num_speculative_tokens: int = Field(ge=1, le=MAX_GUESSES)
    acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    model: str | None = Field(default=None, min_length=1, max_length=200)

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        rates, count = self.acceptance, self.num_speculative_tokens
        if rates and len(rates) != count:
            message = f"{len(rates)} shares for {count} guessed tokens"
            raise _refuse(message, "give one for each position, or one number for all")
        if any(later > rate for rate, later in pairwise(rates)):
            raise _refuse(
                "shares rise from one position to the next",
                "give the share of steps in which so many guesses or more were right, as vLLM logs it",
            )
        needs = self.method in ("eagle", "eagle3", "draft_model")
        if needs != (self.model is not None):
            what = "says no model that guesses" if needs else "has no model of its own"
            raise _refuse(
                f"{self.method} {what}",
                "add 'model', its weights or a model of the catalog"
                if needs
                else "leave 'model' out",
            )
        return self

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a sequence gets of a step: its own, and guesses that were right."""
        return 1.0 + sum(self.acceptance)


class EngineLimits(Frozen):
    """How an engine is started; None leaves a setting as the engine has it.

    `max_num_seqs` and `max_num_batched_tokens` bound a step, `gpu_memory_utilization` is the share of GPU
    memory that the engine takes. `max_model_len` are the tokens of prompt and answer that a request may have
    at most: an engine starts only where the KV cache has room for one such request. `scheduling` is "async"
    where the next step is prepared while the GPU works. `version` is the engine's own, which says how it
    schedules unless told. `prompt_interval` are the steps of decoding after which new prompts are looked at,
    1 for all of them. With `mixed_chunk` prompts are computed beside answers where the engine would compute
    them first. With `mxfp8` experts in MXFP4 compute in MXFP8 on GPUs that can. `load_format` is the
    loader of weights, as the engine calls it. `speculative` is how tokens are guessed ahead, None: not. With
    `expert_parallel` experts are spread over all GPUs of a node, and copies of its layers share them. `host`
    is the host time as measured on the machine.
    """

    max_num_seqs: int | None = Field(default=None, ge=1, le=65536)
    max_num_batched_tokens: int | None = Field(default=None, ge=16, le=1 << 20)
    gpu_memory_utilization: float | None = Field(default=None, ge=0.05, le=1)
    max_model_len: int | None = Field(default=None, ge=1)
    prefix_caching: bool | None = None
    scheduling: Scheduling | None = None
    prompt_interval: int | None = Field(default=None, ge=1, le=1000)
    mixed_chunk: bool | None = None
    mxfp8: bool | None = None
    load_format: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]{0,31}$")
    version: str | None = Field(default=None, pattern=r"^[0-9]{1,4}(\.[0-9]{1,4}){0,2}$")
    speculative: Speculation | None = None
    expert_parallel: bool | None = None
    host: HostTime | None = None

    @model_validator(mode="after")
    def _step_takes_every_sequence(self) -> Self:
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if sequences is not None and tokens is not None and tokens < sequences:
            message = f"a step of {tokens} tokens has no room for {sequences} sequences"
            hint = "raise max_num_batched_tokens, or lower max_num_seqs"
            raise _refuse(message, hint)
        return self

    @property
    def given(self) -> dict[str, object]:
        """Settings that are given, by name."""
        return {k: v for k, v in self.model_dump().items() if v is not None}


class EngineLaunch(EngineLimits):
    """Limits as a plan carries them to the engines it starts, with the number format of the KV cache.

    `max_model_len` is that of the fleet file, else what `plan.context_length` says.
    `dtype` is the number format that is computed in where the GPUs lack that of the weights, `quantization`
    the one that weights are turned into as they are loaded. `tool_parser` and `reasoning_parser` read tool
    calls and thoughts out of a model's answers, by vLLM's names.

    `handover` is an instance's own: the phase that it runs alone, and whether prefill sends KV cache where it
    belongs ("push", which pipelines must) instead of keeping it until it is fetched. So is `kv_bytes`: the KV
    cache of an instance that has a share of a GPU.

    `promised_ttft_s` is the time to the first token that the service promises: prompts wait in an order that
    keeps most of such promises where an engine can do that.
    """

    kv_cache_dtype: str | None = Field(default=None, max_length=32)
    dtype: str | None = Field(default=None, max_length=32)
    quantization: str | None = Field(default=None, max_length=32)
    tool_parser: str | None = Field(default=None, max_length=32)
    reasoning_parser: str | None = Field(default=None, max_length=32)
    handover: Handover | None = None
    kv_bytes: int | None = Field(default=None, ge=1)
    promised_ttft_s: float | None = Field(default=None, gt=0)

    def options(self) -> dict[str, object]:
        """Return limits that are set and could be options of an engine: no measured times, no promises."""
        beside = (
            "host",
            "version",
            "promised_ttft_s",
            "tool_parser",
            "reasoning_parser",
            "handover",
        )
        return {k: v for k, v in self.given.items() if k not in beside}
