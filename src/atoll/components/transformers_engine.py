"""A language model by transformers in a thread of this process: batches, with pictures encoded elsewhere.

For models whose positions or layers have to know more of a picture than its vectors, which Atoll's own
engine does not take: grids (M-RoPE), features for the first layers (deepstack), attention within a picture.
What waits when a batch ends is the next batch. Tokens are chosen by the engine's own sampler, so the same
request gives the same answer whatever it is batched with, up to rounding.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.components.chat_inputs import SeenPicture
from atoll.components.transformers_parts import ModelPart
from atoll.core.errors import UsageError, shorten
from atoll.engine.engine_errors import EngineError
from atoll.engine.engine_messages import FINISH_CODES
from atoll.engine.guidance import MatcherFactory
from atoll.engine.scheduler_core import GenerateRequest, TokenEvent
from atoll.engine.text import TextCodec

_LOG = logging.getLogger(__name__)
_STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRequest(GenerateRequest):
    """A request with the pictures whose vectors are its `embeds`, in order."""

    pictures: tuple[SeenPicture, ...] = ()


@dataclass(slots=True, eq=False)
class _Job:
    """A request that waits or runs; `left` once nobody listens any more."""

    request: PictureRequest
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[TokenEvent] = field(default_factory=asyncio.Queue)
    sampler: Any = None
    said: int = 0
    left: bool = False
    ended: bool = False

    def emit(self, **event: Any) -> None:
        """Tell the listener, from the engine's thread."""
        index = len(self.request.generated) + self.said
        told = TokenEvent(self.request.id or "", index, **event)
        self.said += told.token is not None
        self.ended = told.finish_reason is not None
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, told)
        except RuntimeError:  # the loop is closed: nobody listens
            self.left = True


class TransformersEngine:
    """One model of transformers and the thread in which it answers, `max_batch` requests at a time."""

    def __init__(self, part: ModelPart, *, max_batch: int, max_length: int | None) -> None:
        import inspect

        if "mm_encoder_outputs" not in inspect.signature(part.model.forward).parameters:
            raise UsageError(
                "this version of transformers takes no pictures that were encoded elsewhere",
                hint="pip install --upgrade transformers",
            )
        from transformers import GenerationConfig

        self.codec = TextCodec(part.folder)
        self.max_length = min(self.codec.max_length, max_length or self.codec.max_length)
        self._part = part
        # How tokens are chosen is the request's to say, not the checkpoint's.
        part.model.generation_config = GenerationConfig()
        self._max_batch = max_batch
        self._matchers = MatcherFactory(part.folder, self.codec.vocabulary, self.codec.eos)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="transformers", daemon=True)
        self._closed = False

    async def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """Stream the answer; left early, it is cancelled. EngineError if it cannot be given."""
        if self._closed:
            raise EngineError("the engine is closed")
        if not isinstance(request, PictureRequest):
            raise TypeError("a request of this engine says what its pictures are")
        job = _Job(request, asyncio.get_running_loop())
        self._jobs.put(job)
        try:
            while True:
                event = await job.events.get()
                if event.finish_reason == "error":
                    raise EngineError(event.error or "the engine broke")
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            job.left = True

    async def close(self) -> None:
        """End what runs and the thread."""
        self._closed = True
        self._jobs.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _STOP_S)

    def _serve(self) -> None:
        ends = False
        while not ends and (first := self._jobs.get()) is not None:
            batch = [first]
            while len(batch) < self._max_batch and not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    ends = True
                    break
                batch.append(job)
            self._answer([job for job in batch if not job.left])
        while not self._jobs.empty():
            if (late := self._jobs.get()) is not None:
                late.emit(finish_reason="error", error="the engine is closed")

    def _answer(self, batch: list[_Job]) -> None:
        if not batch:
            return
        try:
            self._run(batch)
        except Exception as error:  # noqa: BLE001 - whoever waits must hear of it
            _LOG.error("%d answers broke off", len(batch), exc_info=error)
            words = shorten(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
            for job in batch:
                # One may have broken all: each that has said nothing yet is tried alone.
                if len(batch) > 1 and not job.said:
                    self._answer([job])
                elif not job.ended:
                    job.emit(finish_reason="error", error=words)

    def _run(self, batch: Sequence[_Job]) -> None:
        import torch
        from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
        from transformers.generation import StoppingCriteriaList

        from atoll.engine.token_sampling import Sampler

        for job in batch:
            request = job.request
            sampling = request.sampling
            if sampling.seed is None:
                sampling = sampling.model_copy(update={"seed": secrets.randbits(62)})
            tokens = [*request.prompt, *request.generated]
            job.sampler = Sampler(
                sampling, self.codec.eos, tokens, len(request.prompt), self._matchers
            )

        class Choose(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any) -> Any:  # noqa: ARG002
                """Leave one token a row possible, chosen as the row's request says."""
                chosen = [_choose(job, scores[row]) for row, job in enumerate(batch)]
                only = torch.full_like(scores, -math.inf)
                only[torch.arange(len(chosen)), torch.tensor(chosen)] = 0.0
                return only

        class Ended(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:  # noqa: ARG002
                """Say which rows are over, or heard by nobody."""
                over = [closed() or job.ended or job.left for job in batch]
                return torch.tensor(over, device=ids.device)

        def closed() -> bool:
            return self._closed

        room = max(j.request.sampling.max_tokens - len(j.request.generated) for j in batch)
        with torch.inference_mode():
            self._part.model.generate(
                **self._inputs(batch),
                do_sample=False,
                max_new_tokens=room,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([Choose()]),
                stopping_criteria=StoppingCriteriaList([Ended()]),
            )
        for job in batch:
            if not job.ended:
                job.emit(finish_reason="error", error="the engine is closed")

    def _inputs(self, batch: Sequence[_Job]) -> dict[str, Any]:
        """Return what transformers is given: prompts filled up on the left, and pictures in their order."""
        import torch

        family, model, device = self._part.family, self._part.model, self._part.device
        rows = [[*job.request.prompt, *job.request.generated] for job in batch]
        longest = max(map(len, rows))
        ids = np.zeros((len(rows), longest), np.int64)
        there = np.zeros_like(ids)
        pictured = np.zeros_like(ids)
        for number, (job, row) in enumerate(zip(batch, rows, strict=True)):
            ids[number, longest - len(row) :] = row
            there[number, longest - len(row) :] = 1
            if job.request.embeds is not None:
                pictured[number, longest - len(row) + job.request.embeds.positions] = 1
        ids[pictured == 1] = model.config.image_token_id
        inputs: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(there).to(device),
        }
        if family.token_types is not None:
            inputs[family.token_types] = torch.from_numpy(pictured).to(device)
        pictures = [picture for job in batch for picture in job.request.pictures]
        if pictures:
            if family.has_grid:
                inputs["image_grid_thw"] = torch.tensor([p.grid for p in pictures], device=device)
            inputs["mm_encoder_outputs"] = {"image": self._seen(pictures)}
        return inputs

    def _seen(self, pictures: Sequence[SeenPicture]) -> Any:
        """Return pictures as the model's own tower would give them."""
        import torch
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        def send(array: Any) -> Any:
            return torch.tensor(array).to(self._part.device, self._part.model.dtype)

        vectors = [send(picture.embeds) for picture in pictures]
        if not self._part.family.has_grid:
            # [tiles, vectors of one, width] there; nothing but the order counts.
            return BaseModelOutputWithPooling(pooler_output=torch.cat(vectors)[None])
        seen = BaseModelOutputWithPooling(pooler_output=tuple(vectors))
        layers = [send(p.deepstack) for p in pictures if p.deepstack is not None]
        if layers:
            seen["deepstack_features"] = [tuple(each) for each in zip(*layers, strict=True)]
        return seen


def _choose(job: _Job, logits: Any) -> int:
    """Choose the next token of a row and tell whoever listens; 0 where the row is over."""
    if job.ended or job.left:
        return 0
    chosen = job.sampler.choose(logits)
    finish: Any = FINISH_CODES[chosen.finish]
    logprob = None if math.isnan(chosen.logprob) else chosen.logprob
    job.emit(token=chosen.token, logprob=logprob, top=chosen.top, finish_reason=finish)
    return int(chosen.token)
