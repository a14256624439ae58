"""What fleet files say of classes, paths and measured rates; what is wrong is said in one line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import AtollError, InputError
from atoll.perf.components.measured import MeasuredRates
from atoll.plan.files.fleet_file import load_fleet, parse_fleet
from atoll.plan.problem import Problem, Service
from atoll.workload.classes import ImageOutput, Images, Video

ROOT = Path(__file__).resolve().parents[3]
POOL = """\
pool:
  owned:
    lab: {A100-80:2: 3, L4:1: 4}
"""


def text(body: str, *, model: str = "qwen2.5-omni-7b", promise: bool = True) -> str:
    """A fleet of one service; its `body` starts in line 6, or in line 4 without promises."""
    lines = ["services:", "  own:", f"    model: {model}"]
    lines += ["    ttft: 3s", "    tpot: 100ms"] if promise else []
    lines += [f"    {line}" for line in body.splitlines()]
    return "\n".join([*lines, "    rate: 2/s", POOL])


def service(body: str, *, model: str = "qwen2.5-omni-7b", promise: bool = True) -> Service:
    (own,) = parse_fleet(text(body, model=model, promise=promise)).services
    return own


def refused(body: str, *, model: str = "qwen2.5-omni-7b", promise: bool = True) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_fleet(text(body, model=model, promise=promise))
    return caught.value


# What is understood


def test_every_key_of_a_class() -> None:
    own = service(
        """\
classes:
  text: {share: 0.5, input: 100, output: 50, input_cv: 0.5, output_cv: 1, ttft: 1s, tpot: 20ms}
  image+video+audio -> audio (all):
    share: 50%
    images: {count: 1.5, size: 100x200}
    video: {frames: 8, size: 300x400}
    audio: 7s
    speech: 9s
    ahead: 500ms
paths:
  - [llm]
  - [vision + audio, talker+vocoder, llm]
rates:
  vocoder: {A100-80: {speech_s: 12/s}, L4:1: {speech_s: 3/s, request: 60/min}}
"""
    )
    media, plain = own.classes
    assert (plain.input_tokens, plain.output_tokens, plain.input_cv, plain.output_cv) == (
        100.0,
        50.0,
        0.5,
        1.0,
    )
    assert (plain.ttft_s, plain.tpot_s) == (1.0, 0.02)
    assert (media.ttft_s, media.tpot_s) == (3.0, 0.1)  # the service's
    assert (own.ttft_s, own.tpot_s) == (3.0, 0.1)  # the loosest
    assert media.images == Images(count=1.5, width_px=100, height_px=200)
    assert media.video == Video(frames=8, width_px=300, height_px=400)
    assert (media.audio_s, media.speech_s, media.ahead_s) == (7.0, 9.0, 0.5)
    assert own.paths == (("llm",), ("vision+audio", "talker+vocoder", "llm"))
    assert [(r.part, r.on, r.unit, r.per_s) for r in own.rates] == [
        ("vocoder", "A100-80", "speech_s", 12.0),
        ("vocoder", "L4:1", "request", 1.0),
        ("vocoder", "L4:1", "speech_s", 3.0),
    ]
    # The llm sees text and media: more than the text alone, and half of the answers of each.
    assert own.lengths.output_mean == pytest.approx(0.5 * 50 + 0.5 * 150)
    assert own.lengths.input_mean > 0.5 * 100 + 0.5 * 300


def test_every_key_of_a_class_that_wants_images() -> None:
    own = service(
        "classes: {text -> image: {share: 1, input: 50, image: {count: 2, size: 512x256, steps: 8,"
        " guided: true}, image_within: 30s}}",
        model="qwen-image",
        promise=False,
    )
    (only,) = own.classes
    assert only.image_output == ImageOutput(
        count=2, width_px=512, height_px=256, steps=8, guided=True
    )
    assert (only.image_s, only.ttft_s, only.tpot_s) == (30.0, None, None)


def test_what_a_name_says_comes_in_the_usual_size() -> None:
    own = service("classes: {image+video+audio -> audio: {share: 1}}")
    (only,) = own.classes
    assert (only.images, only.video) == (Images(), Video())
    assert (only.audio_s, only.speech_s) == (10.0, 10.0)


def test_promises_may_be_left_out() -> None:
    own = service("classes: {text: {share: 1}}", promise=False)
    assert (own.classes[0].ttft_s, own.classes[0].tpot_s) == (None, None)
    half = service(
        "classes: {text: {share: 0.5, ttft: 1s}, text (slow): {share: 0.5}}", promise=False
    )
    assert [k.ttft_s for k in half.classes] == [1.0, None]
    assert half.ttft_s == 1.0


def test_labels_tell_classes_apart() -> None:
    own = service("classes: {text (a): {share: 0.5}, text (b.1): {share: 0.5, ttft: 9s}}")
    assert [k.name for k in own.classes] == ["text (a)", "text (b.1)"]


def test_the_order_of_the_file_changes_nothing() -> None:
    classes = {"text": {"share": 0.3}, "audio": {"share": 0.3}, "image+text": {"share": 0.4}}
    paths = [["llm"], ["vision", "llm"], ["audio", "llm"]]
    rates = {"llm": {"L4": {"request": "1/s", "token": "9/s"}}, "vision": {"L4": {"image": "3/s"}}}
    hashes = set()
    for seed in range(6):
        shuffle = random.Random(seed)

        def turned(data: dict[str, object], by: random.Random = shuffle) -> dict[str, object]:
            return dict(by.sample(sorted(data.items()), len(data)))

        body = {
            "classes": turned(dict(classes)),
            "paths": shuffle.sample(paths, len(paths)),
            "rates": turned({part: turned(dict(places)) for part, places in rates.items()}),
        }
        hashes.add(parse_fleet(text(yaml.safe_dump(body, sort_keys=False))).content_hash())
    assert len(hashes) == 1


def test_classes_of_text_alone_are_a_plain_service() -> None:
    mixed = "classes: {text: {share: 0.5, input: 100, output: 50}, text (long): {share: 0.5, input: 300}}"
    own = service(mixed)
    assert not own.is_graph
    assert (own.ttft_s, own.tpot_s) == (3.0, 0.1)
    assert (own.lengths.input_mean, own.lengths.output_mean) == (200.0, 100.0)
    assert own.lengths.input_mean_square == 0.5 * 100**2 + 0.5 * 300**2
    one = service("classes: {text: {share: 1, input: 512, output: 128, input_cv: 1.5}}")
    assert one == service("lengths: {input: 512, output: 128, input_cv: 1.5}")
    # What a plain service cannot say makes it one of executors.
    for more in (
        "\npaths: [[llm]]",
        "\nrates: {llm: {L4: {request: 1/s}}}",
    ):
        assert service(mixed + more).is_graph
    assert service(mixed, promise=False).is_graph
    assert service(mixed.replace("input: 300", "ttft: 9s")).is_graph
    assert service("classes: {image+text: {share: 1}}").is_graph


# What is refused: field, line, and a word of the reason

TEXT = "classes: {text: {share: 1}}\n"
SEEN = "classes: {image+text: {share: 1, images: {%s}}}"
DRAWN = "classes: {text -> image: {share: 1%s}}"
REFUSED: dict[str, tuple[str, str, str]] = {
    "no classes": ("classes: {}", "classes", "at least 1"),
    "classes as a list": ("classes: []", "classes", "mapping"),
    "an empty class": ("classes: {text: }", "classes.text", "mapping"),
    "no share": ("classes: {text: {}}", "classes.text.share", "required"),
    "half a share": ("classes: {text: {share: 50%}}", "classes", "add up to 0.5"),
    "share 0": ("classes: {text: {share: 0}}", "classes.text.share", "greater than 0"),
    "share not a number": ("classes: {text: {share: .nan}}", "classes.text.share", "finite"),
    "share in words": ("classes: {text: {share: half}}", "classes.text.share", "a share"),
    "an unknown field": ("classes: {text: {share: 1, inptu: 3}}", "classes.text.inptu", "no such"),
    "an unknown class": ("classes: {smell: {share: 1}}", "classes.smell", "smell"),
    "a blank after a class": ("classes: {'text ': {share: 1}}", "classes.text", "no class"),
    "video wanted": ("classes: {text -> video: {share: 1}}", "classes.text -> video", "want"),
    "a size as a number": (SEEN % "size: 0x10", "classes.image+text.images.size", "pixels"),
    "a large size": (SEEN % "size: 99999x10", "classes.image+text.images.size", "16384"),
    "a size as a list": (SEEN % "size: [64, 48]", "classes.image+text.images.size", "pixels"),
    "three sizes": (SEEN % "size: 64x48x3", "classes.image+text.images.size", "pixels"),
    "no images": (SEEN % "count: 0", "classes.image+text.images.count", "greater than 0"),
    "images as a flag": (SEEN % "count: true", "classes.image+text.images.count", "number"),
    "many images": (SEEN % "count: 1.0e+300", "classes.image+text.images.count", "1000"),
    "images of text": (
        "classes: {text: {share: 1, images: {count: 2}}}",
        "classes.text",
        "disagree on image",
    ),
    "ahead of text": ("classes: {text: {share: 1, ahead: 1s}}", "classes.text", "none is wanted"),
    "ahead of all": (
        "classes: {text -> audio: {share: 1, speech: 9s, ahead: 9s}}",
        "classes.text -> audio",
        "cannot be 9 s ahead",
    ),
    "an image of text": (
        "classes: {text: {share: 1, image_within: 9s}}",
        "classes.text",
        "none is wanted",
    ),
    "input as text": ("classes: {text: {share: 1, input: '9'}}", "classes.text.input", "number"),
    "input beyond the context": (
        "classes: {text: {share: 1, input: 40000}}",
        "classes.text",
        "40,150 tokens, media included, exceed the model's 32,768",
    ),
    "media beyond the context": (
        "classes: {video: {share: 1, video: {frames: 100000, size: 16384x16384}}}",
        "classes.video",
        "tokens",
    ),
    "sound beyond the context": (
        "classes: {audio: {share: 1, audio: 24h}}",
        "classes.audio",
        "exceed the model's 32,768",
    ),
    "half a frame": (
        "classes: {video: {share: 1, video: {frames: 1.5}}}",
        "classes.video.video.frames",
        "integer",
    ),
    "no time": ("classes: {text: {share: 1, ttft: 0s}}", "classes.text.ttft", "greater"),
    "a spread below 0": ("classes: {text: {share: 1, input_cv: -1}}", "classes.text.input_cv", "0"),
    "images that it does not make": (DRAWN % "", "classes.text -> image.image", "makes no images"),
    "lengths, too": (TEXT + "lengths: 512x128", "lengths", "said twice"),
    "no paths": (TEXT + "paths: []", "paths", "at least 1"),
    "an empty path": (TEXT + "paths: [[]]", "paths.0", "without executors"),
    "paths as text": (TEXT + "paths: [llm]", "paths.0", "list"),
    "an unknown part": (TEXT + "paths: [[llm], [nose]]", "paths.1.0", "'nose'; known: audio"),
    "no part": (TEXT + "paths: [[llm+]]", "paths.0.0", "unknown part"),
    "a part twice": (TEXT + "paths: [[llm+llm]]", "paths.0.0", "twice"),
    "an llm and a phase of it": (TEXT + "paths: [[llm+llm.decode]]", "paths.0.0", "twice"),
    "a path twice": (TEXT + "paths: [[llm], [llm]]", "paths.1", "the same as path 0"),
    "a path that nobody goes": (TEXT + "paths: [[llm], [vision]]", "paths.1", "no class can go"),
    "a class without a path": (
        "classes: {text: {share: 0.5}, audio: {share: 0.5}}\npaths: [[vision, llm]]",
        "paths",
        "'audio' can go none",
    ),
    "phases that are not to be": (
        TEXT + "phases: together\npaths: [[llm.prefill, llm.decode]]",
        "paths",
        "'text' can go none of the paths: it needs llm",
    ),
    "half an llm": (TEXT + "paths: [[llm.prefill]]", "paths", "needs llm or llm.prefill"),
    "rates of an unknown part": (
        TEXT + "rates: {nose: {L4: {request: 1/s}}}",
        "rates.nose",
        "unknown part",
    ),
    "rates on an unknown GPU": (
        TEXT + "rates: {llm: {X9: {request: 1/s}}}",
        "rates.llm.X9",
        "unknown gpu",
    ),
    "rates of an unknown unit": (
        TEXT + "rates: {llm: {L4: {mile: 1/s}}}",
        "rates.llm.L4.mile",
        "'request'",
    ),
    "a rate of nothing": (
        TEXT + "rates: {llm: {L4: {request: 0/s}}}",
        "rates.llm.L4.request",
        "none",
    ),
    "a rate beyond all": (
        TEXT + "rates: {llm: {L4: {request: 1e12/s}}}",
        "rates.llm.L4.request",
        "1000000000",
    ),
    "rates nowhere": (TEXT + "rates: {llm: {}}", "rates.llm", "nowhere"),
    "rates of no unit": (TEXT + "rates: {llm: {L4: {}}}", "rates.llm.L4", "nothing was measured"),
    "a place twice": (
        TEXT + "rates: {llm: {L4: {request: 1/s}, l4: {request: 2/s}}}",
        "rates.llm.l4",
        "the same as L4",
    ),
    "rates of a plain service": (
        "lengths: 9x9\nrates: {llm: {L4: {request: 1/s}}}",
        "rates",
        "with classes",
    ),
    "paths of a plain service": ("lengths: 9x9\npaths: [[llm]]", "paths", "with classes"),
    "nothing at all": ("", "lengths", "required"),
    "a workload that has no classes": ("classes: azure-conv", "classes", "multimodal"),
    "a folder": ("classes: /", "classes", "unknown workload"),
    "a missing file": ("classes: gone.csv", "classes", "gone.csv"),
}


def check_line(error: InputError, field: str, reason: str) -> None:
    assert error.path == "fleet.yaml"
    assert error.field == f"services.own.{field}"
    assert error.line
    assert error.hint
    line = str(error)
    assert reason in line
    assert "\n" not in line
    assert line.startswith(f"fleet.yaml:{error.line}: services.own.{field}: ")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    body, field, reason = REFUSED[name]
    check_line(refused(body), field, reason)


OTHER_MODELS: dict[str, tuple[str, str, str, str]] = {
    "images for a model of text": (
        "qwen3-8b",
        "classes: {image+text: {share: 1}}",
        "classes.image+text.images",
        "looks at no images",
    ),
    "sound for one that sees": (
        "qwen2.5-vl-7b",
        "classes: {audio: {share: 1}}",
        "classes.audio.audio",
        "hears no audio",
    ),
    "speech of one that sees": (
        "qwen2.5-vl-7b",
        "classes: {text -> audio: {share: 1}}",
        "classes.text -> audio.speech",
        "does not speak",
    ),
    "a workload of images for a model of text": (
        "qwen3-8b",
        "classes: multimodal",
        "classes",
        "takes no images",
    ),
    "text of one that draws": (
        "qwen-image",
        "classes: {text: {share: 1}}",
        "classes.text",
        "writes no text",
    ),
    "images for one that draws": (
        "qwen-image",
        "classes: {image -> image: {share: 1}}",
        "classes.image -> image.images",
        "looks at no images",
    ),
    "guided by a number": (
        "qwen-image",
        DRAWN % ", image: {guided: 1}",
        "classes.text -> image.image.guided",
        "boolean",
    ),
    "an answer that nobody wants": (
        "qwen-image",
        DRAWN % ", output: 100",
        "classes.text -> image.output",
        "wants no text",
    ),
    "a first text that nobody wants": (
        "qwen-image",
        DRAWN % ", ttft: 1s",
        "classes.text -> image.ttft",
        "wants no text",
    ),
    "no class for one that draws": ("qwen-image", "lengths: 9x9", "", "made of text, dit, vae"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_what_a_model_cannot_do(name: str) -> None:
    model, body, field, reason = OTHER_MODELS[name]
    error = refused(body, model=model, promise=model != "qwen-image")
    if field:
        check_line(error, field, reason)
    else:
        assert error.field == "services.own"
        assert reason in str(error)


def test_promises_of_text_where_only_images_are_wanted() -> None:
    check_line(refused(DRAWN % "", model="qwen-image"), "ttft", "no class wants text")


def test_classes_need_a_pool() -> None:
    cluster = text("classes: {audio: {share: 1}}").partition("pool:")[0] + (
        "cluster:\n  nodes: {lab: {L4:1: 2}}\n  links:\n"
        "    - {between: ['*', '*'], bandwidth: 1Gbit/s, latency: 1ms}\n"
    )
    with pytest.raises(InputError) as caught:
        parse_fleet(cluster)
    check_line(caught.value, "classes", "planned on pools")


# Workloads


def from_trace(tmp_path: Path, rows: str, model: str = "qwen2.5-vl-7b") -> Service:
    (tmp_path / "trace.csv").write_text(
        "arrival_s,input_tokens,output_tokens,class,items\n" + rows, encoding="utf-8"
    )
    (tmp_path / "fleet.yaml").write_text(text("classes: trace.csv", model=model), encoding="utf-8")
    (own,) = load_fleet(tmp_path / "fleet.yaml", environ={}).services
    return own


def test_classes_of_a_trace(tmp_path: Path) -> None:
    rows = "0,100,10,text,0\n1,5000,30,image,2\n2,300,20,text,0\n3,7000,50,image+text,4\n"
    own = from_trace(tmp_path, rows)
    seen, plain = own.classes
    assert (plain.name, plain.share, plain.input_tokens, plain.output_tokens) == (
        "text",
        0.5,
        200.0,
        15.0,
    )
    assert plain.input_cv == pytest.approx(0.5)
    assert (seen.name, seen.share, seen.output_tokens) == ("image+text", 0.5, 40.0)
    assert seen.images is not None
    assert seen.images.count == 3.0
    assert (seen.ttft_s, seen.tpot_s) == (3.0, 0.1)
    # The llm sees prompts as long as those of the trace, and as different: 100 to 7000 tokens.
    prompts = [100.0, 300.0, 5000.0, 7000.0]
    assert own.lengths.input_mean == pytest.approx(sum(prompts) / 4)
    assert own.lengths.input_mean_square == pytest.approx(sum(p * p for p in prompts) / 4)


def test_images_that_are_not_counted_are_one(tmp_path: Path) -> None:
    own = from_trace(tmp_path, "0,5000,10,image,0\n1,5000,10,image,3\n")
    (seen,) = own.classes
    assert seen.images is not None
    assert seen.images.count == 2.0


def test_prompts_shorter_than_their_images_have_some_text(tmp_path: Path) -> None:
    (seen,) = from_trace(tmp_path, "0,10,10,image,3\n").classes
    assert seen.input_tokens == 1.0


@pytest.mark.parametrize("klass", ["video", "audio", "text -> audio", "smell", "image+audio"])
def test_other_media_of_a_trace_have_no_size(tmp_path: Path, klass: str) -> None:
    with pytest.raises(InputError, match=r"says nothing of their sizes") as caught:
        from_trace(tmp_path, f"0,100,10,text,0\n1,100,10,image,1\n2,9,9,{klass},1\n")
    assert caught.value.field == "services.own.classes"
    assert caught.value.line == 6


def test_more_images_than_a_request_brings(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="less than or equal to 1000"):
        from_trace(tmp_path, "0,5000,10,image,2000\n")


def test_an_empty_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no requests"):
        from_trace(tmp_path, "")


def test_the_built_in_workload() -> None:
    own = service("classes: multimodal", model="qwen2.5-vl-7b")
    assert sum(klass.share for klass in own.classes) == pytest.approx(1.0)
    assert any(klass.images is not None for klass in own.classes)
    assert own == service("classes: multimodal", model="qwen2.5-vl-7b")


# Measured rates


def test_measured_units_add_up_and_what_was_not_measured_is_predicted() -> None:
    own = service(
        """\
classes:
  image+video: {share: 0.4, images: {count: 3}, video: {frames: 20}}
  video: {share: 0.3, video: {frames: 20}}
  audio: {share: 0.3}
rates: {vision: {L4: {image: 6/s, frame: 10/s}, 'L4:1': {image: 12/s}}}
"""
    )
    node = parse_fleet(text(TEXT)).catalog().node("L4:1")
    both, video, audio = (own.klass(name) for name in ("image+video", "video", "audio"))
    measured = MeasuredRates(rates=own.rates)
    # On the very node type images were measured alone; frames are of the GPU type.
    assert measured.request_seconds("vision", node, video) == pytest.approx(20 / 10)
    assert measured.request_seconds("vision", node, both) == pytest.approx(3 / 12)
    assert measured.request_seconds("vision", node, audio) is None
    assert measured.request_seconds("llm", node, both) is None
    alone = MeasuredRates(rates=tuple(rate for rate in own.rates if rate.on == "L4"))
    assert alone.request_seconds("vision", node, both) == pytest.approx(3 / 6 + 20 / 10)


# Whatever is written

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-10, 10**20)
    | st.floats()
    | st.sampled_from(["text", "llm", "50%", "1s", "640x480", "0x10", "1/s", "L4", "multimodal"])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2)
    ),
    max_leaves=5,
)
KEYS = (
    "share",
    "input",
    "images",
    "video",
    "audio",
    "speech",
    "image",
    "ttft",
    "ahead",
    "input_cv",
)


@given(
    st.sampled_from(["text", "image+text", "audio -> audio", "text -> image", "video", "x"]),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=3),
    st.dictionaries(st.sampled_from(["paths", "rates", "classes", "lengths"]), values, max_size=1),
)
def test_any_values_give_a_problem_or_an_error_of_one_line(
    name: str, fields: dict[str, object], more: dict[str, object]
) -> None:
    data = yaml.safe_load(text(TEXT))
    data["services"]["own"] |= {"classes": {name: {"share": 1, **fields}}, **more}
    said = ""
    try:
        problem = parse_fleet(yaml.safe_dump(data, allow_unicode=True))
    except AtollError as error:
        said = str(error)
    else:
        assert Problem.from_json(problem.to_json()) == problem
    assert "\n" not in said
