"""Components by name, imported when they are loaded."""

from __future__ import annotations

from importlib import import_module

from atoll.components.base import LoadedComponent
from atoll.core.errors import UnknownNameError

COMPONENTS: dict[str, str] = {
    "efficientnet-lite0": "atoll.components.efficientnet:EfficientNetLite0",
    "hibari": "atoll.components.hibari:Hibari",
    "minilm": "atoll.components.minilm:MiniLm",
    "moonshine-decoder": "atoll.components.moonshine:MoonshineDecoder",
    "moonshine-encoder": "atoll.components.moonshine:MoonshineEncoder",
    "openai-chat": "atoll.runtime.executor.openai_chat:OpenAiChat",
    "pp-ocr": "atoll.components.pp_ocr:PpOcr",
    "qwen-image-dit": "atoll.components.qwen_image:QwenImageDit",
    "qwen-image-text": "atoll.components.qwen_image:QwenImageText",
    "qwen-image-vae": "atoll.components.qwen_image:QwenImageVae",
    "silero-vad": "atoll.components.silero:SileroVad",
    "smollm2": "atoll.runtime.executor.smollm2:SmolLm2",
    "smollm2-vision": "atoll.components.smollm2_vision:SmolLm2Vision",
    "terrain-diffusion": "atoll.components.terrain_diffusion:TerrainDiffusion",
    "transformers-chat": "atoll.runtime.executor.transformers_chat:TransformersChat",
    "transformers-vision": "atoll.components.transformers_vision:TransformersVision",
    "vllm-chat": "atoll.runtime.executor.vllm_chat:VllmChat",
    "whisper-decoder": "atoll.components.whisper:WhisperDecoder",
    "whisper-encoder": "atoll.components.whisper:WhisperEncoder",
}
"""Where the class of each component is: "module:Class". Components of others are named the same way."""


def find_component(name: str) -> type[LoadedComponent]:
    """Return the class of a component, by its name here or as "module:Class" of trusted code."""
    where = COMPONENTS.get(name, name)
    module, sign, attribute = where.partition(":")
    if not sign:
        raise UnknownNameError("component", name, COMPONENTS)
    found = getattr(import_module(module), attribute, None)
    if not (isinstance(found, type) and issubclass(found, LoadedComponent)):
        raise UnknownNameError("component", name, COMPONENTS)
    return found
