"""Components of any-to-any models against Cornserve's measurements on A100-80: its table 1.

Table 1 has requests/s of single components on one GPU, for requests of 600 image, 10,000 video and 200 audio
tokens, 1,000 tokens of prompt and 100 of answer; pictures of 512 x 512 take 20 steps. Sizes in pixels are
not given: here an image has 784 x 588 (588 tokens of Qwen2.5-VL, 12 tiles and a thumbnail of InternVL3) and
a video 40 frames of 700 x 560 (10,000 tokens of the former, 10,240 of the latter). Text counts with the
tokens of all inputs. Speech for 100 tokens is taken to last 30 s. Diffusers and vocoders ran one request at
a time there (Hugging Face libraries), and so they do here.

Figure 2, whole deployments, is compared by `benchmarks.cells`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from atoll.catalog import Catalog
from atoll.engines.table import EngineChoice
from atoll.perf.components.executor import ExecutorWork, executor_work
from atoll.workload.classes import ImageOutput, Images, RequestClass, Video
from benchmarks.report import Figure

IMAGE = Images(count=1, width_px=784, height_px=588)
VIDEO = Video(frames=40, width_px=700, height_px=560)
SPEECH_S = 30.0
TABLE = {
    ("qwen2.5-vl-32b", "image"): 12.04,
    ("qwen2.5-vl-32b", "video"): 0.89,
    ("qwen2.5-vl-32b", "text"): 0.32,
    ("internvl3-38b", "image"): 1.13,
    ("internvl3-38b", "video"): 0.74,
    ("internvl3-38b", "text"): 0.28,
    ("qwen2.5-omni-7b", "image"): 15.64,
    ("qwen2.5-omni-7b", "video"): 1.28,
    ("qwen2.5-omni-7b", "audio"): 34.04,
    ("qwen2.5-omni-7b", "text"): 1.09,
    ("qwen2.5-omni-7b", "audio out"): 0.28,
    ("qwen-image", "text"): 15.67,
    ("qwen-image", "image out"): 0.20,
}
FITTED = {("qwen2.5-omni-7b", "video"), ("qwen2.5-omni-7b", "audio")}
"""What the two constants of `batches.Host` were fitted to: no test of the model."""
NOTES = {
    (
        "qwen2.5-vl-32b",
        "text",
    ): "0.32 would be 83 % of the GPU's peak for prefill alone; room for 3 requests",
    ("internvl3-38b", "text"): "as above",
    (
        "internvl3-38b",
        "video",
    ): "0.74 of 40 frames would be 113 % of the GPU's peak: fewer frames there",
    ("qwen2.5-vl-32b", "video"): "nearly the encoder of Qwen2.5-Omni, which took 0.7 times as long",
    ("qwen2.5-omni-7b", "audio out"): "how long speech lasted is not said",
    ("qwen-image", "image out"): "eager kernels of a pipeline that fuses less than counted here",
}


def work(
    model: str,
    parts: Sequence[str],
    node: str,
    klass: RequestClass,
) -> ExecutorWork:
    """Return what an executor carries; it must fit."""
    catalog = Catalog.default()
    found = executor_work(
        catalog.model(model), parts, catalog.node(node), [klass], engine=EngineChoice("vllm")
    )
    assert found is not None, (model, parts, node)
    return found


def table_rate(model: str, column: str) -> float:
    """Return predicted requests/s of a component on one A100-80."""
    node = "A100-80:1"
    media = {
        "image": RequestClass(name="image+text", share=1, images=IMAGE),
        "video": RequestClass(name="video+text", share=1, video=VIDEO),
        "audio": RequestClass(name="audio+text", share=1, audio_s=8.0),
    }
    if column in media:
        klass = media[column]
        part = "audio" if column == "audio" else "vision"
        return 1.0 / work(model, [part], node, klass).seconds[klass.name, part]
    if model == "qwen-image":
        picture = ImageOutput(width_px=512, height_px=512, steps=20)
        klass = RequestClass(name="text -> image", share=1, input_tokens=1000, image_output=picture)
        if column == "text":
            return 1.0 / work(model, ["text"], node, klass).seconds[klass.name, "text"]
        alone = work(model, ["dit", "vae"], node, klass).latency_s
        return 1.0 / sum(alone.values())
    tokens = 11_800.0 if model == "qwen2.5-omni-7b" else 11_600.0
    if column == "text":
        klass = RequestClass(name="text", share=1, input_tokens=tokens, output_tokens=100)
        return 1.0 / work(model, ["llm"], node, klass).seconds[klass.name, "llm"]
    klass = RequestClass(
        name="text -> audio", share=1, input_tokens=tokens, speech_s=SPEECH_S, output_tokens=100
    )
    both = work(model, ["talker", "vocoder"], node, klass)
    return 1.0 / (both.seconds[klass.name, "talker"] + both.latency_s[klass.name, "vocoder"])


def off(ratio: float) -> float:
    """Return by how much a ratio is off, whichever is larger: 1 is twice or half."""
    return max(ratio, 1.0 / ratio) - 1.0


def measure() -> list[Figure]:
    """Print the comparison, and return the figures."""
    print("\nTable 1, requests/s on one A100-80\n")
    print(f"  {'model':18s} {'component':10s} {'predicted':>9s} {'paper':>7s} {'ratio':>6s}")
    errors: dict[tuple[str, str], float] = {}
    for (model, column), paper in TABLE.items():
        rate = table_rate(model, column)
        errors[model, column] = off(rate / paper)
        note = "fitted to this figure" if (model, column) in FITTED else ""
        note = NOTES.get((model, column), note) if errors[model, column] > 0.3 else note
        print(f"  {model:18s} {column:10s} {rate:9.2f} {paper:7.2f} {rate / paper:6.2f}  {note}")
    tested = [error for key, error in errors.items() if key not in FITTED]
    return [
        Figure(
            "table1_median_ratio_err", statistics.median(tested), note="fitted figures left out"
        ),
        Figure("table1_max_ratio_err", max(tested)),
    ]
