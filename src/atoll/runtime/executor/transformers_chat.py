"""The language model of a vision-language checkpoint, by transformers, as a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self

from atoll.components.base import BadInputError, Setup
from atoll.components.chat_inputs import ChatInputs, SeenPicture, frame_vectors
from atoll.components.transformers_engine import PictureRequest, TransformersEngine
from atoll.components.transformers_parts import ModelPart, load_part
from atoll.core.errors import UsageError
from atoll.engine.embeds import FramedVectors
from atoll.engine.scheduler_core import GenerateRequest
from atoll.runtime.executor.smollm2 import EngineChat
from atoll.runtime.instance.choice_request import ChoiceRequest

_MAX_BATCH = 8


class TransformersChat(EngineChat):
    """Chats about pictures that `transformers-vision` has seen, with all that the model has to know of them.

    Options beside those of `load_part`: max_batch (answers made together, 8), max_length (positions of prompt
    and answer together).
    """

    name: ClassVar[str] = "transformers-chat"
    takes_pictures: ClassVar[bool] = True

    def __init__(self, part: ModelPart, engine: TransformersEngine) -> None:
        super().__init__(engine)
        self._part = part
        vision = part.model.config.vision_config
        self._merged = getattr(vision, "spatial_merge_size", 1) ** 2
        self._layers = len(getattr(vision, "deepstack_visual_indexes", ()))

    @classmethod
    def load(cls, setup: Setup) -> Self:
        """Read the language model of a checkpoint."""
        part = load_part(
            setup, cls.name, "vision", tower=False, options=("max_batch", "max_length")
        )
        numbers = {"max_batch": setup.option("max_batch", _MAX_BATCH)}
        numbers["max_length"] = setup.option("max_length", 2**31)
        for name, value in numbers.items():
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} has to be 1 or more, not {value!r}", field=cls.name)
        return cls(part, TransformersEngine(part, **numbers))

    def messages(self, asked: ChatInputs) -> Sequence[dict[str, Any]]:
        """Return the messages with what stands around a picture in the model's prompts."""
        family = self._part.family

        def frame(part: SeenPicture, where: str) -> FramedVectors:
            return FramedVectors(self._check(part, where).embeds, family.before, family.after)

        return frame_vectors(asked.messages, frame)

    def request(self, asked: ChatInputs, choice: ChoiceRequest) -> GenerateRequest:
        """Return what the engine is asked for, pictures included."""
        mark = self._part.model.config.image_token_id
        if mark in choice.prompt:
            raise BadInputError("a text has the mark of a picture in it", "messages")
        if mark in choice.generated:
            raise BadInputError("an answer with the mark of a picture cannot go on", "resume")
        plain = super().request(asked, choice)
        given = {each.name: getattr(plain, each.name) for each in fields(plain)}
        pictures = tuple(
            part
            for message in asked.messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if isinstance(part, SeenPicture)
        )
        return PictureRequest(**given, pictures=pictures)

    def _check(self, seen: SeenPicture, where: str) -> SeenPicture:
        """Refuse a picture that this model's own tower would not have given so."""
        wants_grid = self._part.family.has_grid
        if (seen.grid is not None) is not wants_grid:
            said = "needs the grid of a picture" if wants_grid else "takes no grid of a picture"
            raise BadInputError(f"this model {said}: is its encoder another model's?", where)
        if seen.grid is not None:
            frames, height, width = seen.grid
            if frames * height * width != len(seen.embeds) * self._merged:
                raise BadInputError(
                    f"a grid of {frames} x {height} x {width} patches is not {len(seen.embeds)} vectors",
                    where,
                )
        if (0 if seen.deepstack is None else len(seen.deepstack)) != self._layers:
            raise BadInputError(f"this model needs deepstack of {self._layers} layers", where)
        return seen
