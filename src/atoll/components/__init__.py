"""Components: the parts of any-to-any models that run, one file each.

Begin with `base`, which states the interface; `component_registry` knows components by name.

    silero, moonshine, sound       speech found, and written down; sound as components hand it on
    hibari                         text into speech
    efficientnet, projector, pp_ocr, text_boxes
                                   pictures as tokens, and text read in them
    chat_inputs, smollm2_vision, minilm
                                   what language models are asked (they are in `runtime.executor`: `smollm2`,
                                   `openai_chat`), pictures as they take them, and texts as vectors
    terrain_diffusion              pictures by diffusion
    transformers_parts, transformers_vision, transformers_engine, whisper
                                   towers and language models of published checkpoints, by transformers
    qwen_image                     Qwen-Image in three parts, by diffusers
    onnx, component_weights        onnxruntime, and weights checked by hash

Importing this package loads no weights and no heavy library; a component's file imports what it needs when it
is loaded. May import `engine` and `core`.
"""
