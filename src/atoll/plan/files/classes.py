"""From what a fleet file says of classes of requests to the classes that are planned for."""

from __future__ import annotations

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.document import SchemaDocument
from atoll.catalog.media import EncoderSpec
from atoll.catalog.models import ModelSpec
from atoll.core.errors import InputError, UnknownNameError
from atoll.perf.components.loads import class_ways, llm_lengths
from atoll.perf.components.measured import MeasuredRate
from atoll.plan.files.class_schema import ClassEntry, ImageEntry, ImagesEntry, VideoEntry
from atoll.plan.files.fleet_schema import FleetFile, ServiceEntry
from atoll.plan.problem import Lengths
from atoll.workload.classes import (
    ImageOutput,
    Images,
    RequestClass,
    Video,
    parse_class_name,
)
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import TEXT, Requests, collect

FleetDocument = SchemaDocument[FleetFile]
NO_PROMISE_S = (600.0, 60.0)
"""First text and per token where no class is promised any: the most that a fleet file may promise."""
_BUILT_IN = "multimodal"
_SAMPLE = 20_000


def classes_of(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceEntry, model: ModelSpec
) -> tuple[RequestClass, ...]:
    """Return the classes of a service's requests, none where it says none: then they are text."""
    if entry.classes is None:
        return ()
    if isinstance(entry.classes, str):
        with document.at(*here, "classes"):
            found = _from_workload(document, entry, entry.classes, model)
    else:
        found = tuple(
            _from_entry(document, (*here, "classes", name), entry, name, each)
            for name, each in entry.classes.items()
        )
        total = sum(klass.share for klass in found)
        if abs(total - 1.0) > 1e-6:
            raise document.error(
                f"the shares of the classes add up to {total:.6g}",
                *here,
                "classes",
                hint="make them add up to 100%",
            )
    for klass in found:
        with document.at(*here, "classes", klass.name):
            class_ways(model, klass)
    return found


def _from_entry(
    document: FleetDocument,
    here: tuple[str, ...],
    service: ServiceEntry,
    name: str,
    entry: ClassEntry,
) -> RequestClass:
    with document.at(*here):
        brings, wants = parse_class_name(name)
        # What the name says and no size is given for comes in the usual size.
        images = entry.images or (ImagesEntry() if "image" in brings else None)
        video = entry.video or (VideoEntry() if "video" in brings else None)
        image = entry.image or (ImageEntry() if "image" in wants else None)
        text = "text" in wants
        return RequestClass.parse(
            {
                "name": name,
                "share": entry.share,
                "input_tokens": entry.input,
                "output_tokens": entry.output,
                "input_cv": entry.input_cv,
                "output_cv": entry.output_cv,
                "images": images if images is None else Images.parse(_sized(images)),
                "video": video if video is None else Video.parse(_sized(video)),
                "audio_s": entry.audio or (10.0 if "audio" in brings else None),
                "speech_s": entry.speech or (10.0 if "audio" in wants else None),
                "image_output": image if image is None else ImageOutput.parse(_sized(image)),
                "ttft_s": (entry.ttft or service.ttft) if text else None,
                "tpot_s": (entry.tpot or service.tpot) if text else None,
                "ahead_s": entry.ahead,
                "image_s": entry.image_within,
            }
        )


def _sized(entry: ImagesEntry | VideoEntry | ImageEntry) -> dict[str, object]:
    """The fields of an entry, its size in two."""
    fields: dict[str, object] = dict(entry)
    fields.pop("size")
    fields["width_px"], fields["height_px"] = entry.size
    return fields


def _from_workload(
    document: FleetDocument, service: ServiceEntry, name: str, model: ModelSpec
) -> tuple[RequestClass, ...]:
    """Return classes that occur in a workload: text, and images by how many there are on average."""
    if name == _BUILT_IN:
        from atoll.workload.builtin import get_builtin
        from atoll.workload.synthetic import Synthetic

        built = get_builtin(name)
        drawn = Synthetic(name, built.clock(), built.lengths, count=_SAMPLE, items=built.items)
        requests = collect(drawn)
    else:
        from atoll.workload.traces import read_trace

        path = document.folder / name
        if not path.exists():
            raise UnknownNameError("workload with classes", name, (_BUILT_IN, "a trace file"))
        requests = collect(read_trace(path))
    if len(requests) == 0:
        raise InputError(f"{name} has no requests", hint="give a trace with some")
    return summarize_classes(requests, model, ttft_s=service.ttft, tpot_s=service.tpot)


def summarize_classes(
    requests: Requests, model: ModelSpec, *, ttft_s: float | None, tpot_s: float | None
) -> tuple[RequestClass, ...]:
    """Return the classes of requests with their shares and mean sizes.

    Prompts of a workload count their media: images take what the model's encoder makes of them, at their
    usual size, and the rest is text.
    """
    encoder = next(
        (s for s in model.components.values() if isinstance(s, EncoderSpec) and s.kind == "vision"),
        None,
    )
    usual = Images()
    found = []
    for index, klass in enumerate(requests.classes):
        rows = np.flatnonzero(requests.klass == index)
        if len(rows) == 0:
            continue
        plain = klass == TEXT
        count = 0.0
        if not plain:
            if encoder is None:
                raise InputError(
                    f"{model.name} takes no images, and the workload has some",
                    hint="take a model with a vision encoder, or a workload of text",
                )
            count = 1.0 if requests.items is None else float(requests.items[rows].mean())
        prompt, answer = (a[rows].astype(np.float64) for a in (requests.input, requests.output))
        media = 0.0
        if encoder is not None and not plain:
            media = count * encoder.image_tokens(usual.height_px, usual.width_px)
        found.append(
            RequestClass(
                name="text" if plain else "image+text",
                share=len(rows) / len(requests),
                input_tokens=max(1.0, float(prompt.mean()) - media),
                output_tokens=max(1.0, float(answer.mean())),
                input_cv=_spread(prompt),
                output_cv=_spread(answer),
                images=None if plain else usual.model_copy(update={"count": count}),
                ttft_s=ttft_s,
                tpot_s=tpot_s,
            )
        )
    return tuple(found)


def _spread(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    mean = float(values.mean())
    return min(20.0, float(values.std()) / mean) if mean > 0 else 0.0


def lengths_of(model: ModelSpec, classes: tuple[RequestClass, ...]) -> Lengths:
    """Return the moments of prompts and answers of a model's llm over all classes, media included."""
    if not model.has_llm:
        mean = sum(klass.share * klass.input_tokens for klass in classes)
        return Lengths.of(LengthMix.fixed(max(1.0, mean), 1.0))
    mixes = [(klass.share, llm_lengths(model, klass)) for klass in classes]
    return Lengths(
        input_mean=sum(share * mix.input_mean for share, mix in mixes),
        output_mean=sum(share * mix.output_mean for share, mix in mixes),
        input_mean_square=sum(share * mix.input_mean_square for share, mix in mixes),
        output_mean_square=sum(share * mix.output_mean_square for share, mix in mixes),
    )


def promises_of(classes: tuple[RequestClass, ...]) -> tuple[float, float]:
    """Return the loosest promises of any class, seconds to the first text and per token."""
    first = [klass.ttft_s for klass in classes if klass.ttft_s is not None]
    later = [klass.tpot_s for klass in classes if klass.tpot_s is not None]
    return max(first, default=NO_PROMISE_S[0]), max(later, default=NO_PROMISE_S[1])


def paths_of(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceEntry, model: ModelSpec
) -> tuple[tuple[str, ...], ...]:
    """Return the paths that a service allows: parts of each executor in the order of the model."""
    order = model.graph.parts()
    paths = []
    for number, path in enumerate(entry.paths or ()):
        steps = []
        for at, executor in enumerate(path):
            with document.at(*here, "paths", number, at):
                parts = [part.strip() for part in executor.split("+")]
                for part in parts:
                    if part not in order:
                        raise UnknownNameError(f"part of {model.name}", part, order)
                steps.append("+".join(sorted(set(parts), key=order.index)))
        if not steps:
            raise document.error("a path without executors", *here, "paths", number)
        paths.append(tuple(steps))
    return tuple(paths)


def rates_of(
    document: FleetDocument,
    catalog: Catalog,
    here: tuple[str, ...],
    entry: ServiceEntry,
    model: ModelSpec,
) -> tuple[MeasuredRate, ...]:
    """Return what was measured of parts, checked against the model and the catalog."""
    found = []
    for part, places in entry.rates.items():
        with document.at(*here, "rates", part):
            if part not in model.graph.parts():
                raise UnknownNameError(f"part of {model.name}", part, model.graph.parts())
        for place, rates in places.items():
            with document.at(*here, "rates", part, place):
                on = catalog.node(place).id if ":" in place else catalog.gpu(place).name
            for unit, rate in rates.items():
                if rate <= 0:
                    where = (*here, "rates", part, place, unit)
                    raise document.error("a rate of 0", *where, hint="leave it out")
                found.append(MeasuredRate(part=part, on=on, per_s=rate, unit=unit))
    return tuple(found)
