"""From what a fleet file says of classes of requests to the classes that are planned for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from atoll.catalog.catalog import Catalog
from atoll.catalog.media import EncoderSpec
from atoll.catalog.models import ModelSpec
from atoll.core.errors import InputError, UnknownNameError
from atoll.core.ids import slug
from atoll.perf.components.class_loads import llm_lengths, media_tokens
from atoll.perf.components.component_shapes import autoregressive_spec
from atoll.perf.components.measured import MeasuredRate, Unit, rate_of_batches
from atoll.plan.capacities import prompt_quantile
from atoll.plan.executors import parts_overlap, phase_ways
from atoll.plan.files.class_schema import ImageSpec, ImagesSpec, RequestClassSpec, VideoSpec
from atoll.plan.files.fleet_schema import FleetDocument, ServiceSpec
from atoll.plan.problem import Lengths, Service
from atoll.workload.classes import (
    ImageOutput,
    Images,
    RequestClass,
    Video,
    parse_class_name,
)
from atoll.workload.lengths import LengthMix
from atoll.workload.requests import TEXT, Requests, collect

NO_PROMISE_S = (600.0, 60.0)
"""First text and per token where no class is promised any: the most that a fleet file may promise."""
_BUILT_IN = "multimodal"
_SAMPLE = 20_000
_SLOWEST_PER_S = 1e-6
"""The smallest rate that is taken for a measured one: one request in eleven days."""
_WRITTEN = {
    "input_tokens": "input",
    "output_tokens": "output",
    "audio_s": "audio",
    "speech_s": "speech",
    "sentence_tokens": "sentence",
    "image_output": "image",
    "images": "images",
    "video": "video",
}
"""Names of class fields in a fleet file; errors about others are about the class."""


def classes_of(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec, model: ModelSpec
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
        inside = () if isinstance(entry.classes, str) else (klass.name,)
        with _written(document, *here, "classes", *inside):
            phase_ways(model, klass, entry.phases)
            _check_context(model, klass)
    for field in ("ttft", "tpot"):
        if getattr(entry, field) is not None and not any(map(_wants_text, found)):
            raise document.error("no class wants text", *here, field, hint="leave it out")
    return found


@contextmanager
def _written(document: FleetDocument, *here: str) -> Iterator[None]:
    """Errors raised inside are about a class, and call its fields what the file does."""
    with document.at(*here):
        try:
            yield
        except InputError as error:
            if error.path is not None:
                raise
            field = _WRITTEN.get(error.field or "")
            raise InputError(error.message, field=field, hint=error.hint) from None


def _wants_text(klass: RequestClass) -> bool:
    return "text" in parse_class_name(klass.name)[1]


def _check_context(model: ModelSpec, klass: RequestClass) -> None:
    """Refuse requests that are longer on average than the model's context."""
    if not model.has_llm:
        return
    media = sum(media_tokens(model, klass).values())
    longest, max_context = klass.input_tokens + media + klass.output_tokens, model.llm.max_context
    if longest > max_context:
        raise InputError(
            f"requests of {longest:,.0f} tokens, media included, exceed the model's {max_context:,}",
            hint="use less text or smaller media, or a model with a longer context",
        )


def _from_entry(
    document: FleetDocument,
    here: tuple[str, ...],
    service: ServiceSpec,
    name: str,
    entry: RequestClassSpec,
) -> RequestClass:
    with _written(document, *here):
        brings, wants = parse_class_name(name)
        for field in ("output", "output_cv", "ttft", "tpot"):
            if "text" not in wants and field in entry.model_fields_set:
                raise document.error("the class wants no text", *here, field, hint="leave it out")
        # What the name says and no size is given for comes in the usual size.
        images = entry.images or (ImagesSpec() if "image" in brings else None)
        video = entry.video or (VideoSpec() if "video" in brings else None)
        image = entry.image or (ImageSpec() if "image" in wants else None)
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
                "sentence_tokens": entry.sentence,
                "image_output": image if image is None else ImageOutput.parse(_sized(image)),
                "ttft_s": (entry.ttft or service.ttft) if text else None,
                "tpot_s": (entry.tpot or service.tpot) if text else None,
                "ahead_s": entry.ahead,
                "image_s": entry.image_within,
                "attainment": entry.attainment,
            }
        )


def _sized(entry: ImagesSpec | VideoSpec | ImageSpec) -> dict[str, object]:
    """The fields of an entry, its size in two."""
    fields: dict[str, object] = dict(entry)
    fields.pop("size")
    fields["width_px"], fields["height_px"] = entry.size
    return fields


def _from_workload(
    document: FleetDocument, service: ServiceSpec, name: str, model: ModelSpec
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
        if not path.is_file():
            raise UnknownNameError("workload with classes", name, (_BUILT_IN, "a trace file"))
        requests = collect(read_trace(path))
    if len(requests) == 0:
        raise InputError(f"{name} has no requests", hint="give a trace with some")
    return summarize_classes(requests, model, ttft_s=service.ttft, tpot_s=service.tpot)


def summarize_classes(
    requests: Requests, model: ModelSpec, *, ttft_s: float | None, tpot_s: float | None
) -> tuple[RequestClass, ...]:
    """Return the classes of requests with their shares and mean sizes: text, and text with images.

    Prompts of a workload count their media: images take what the model's encoder makes of them, at their
    usual size, and the rest is text. A workload says nothing of the size of other media.
    """
    encoder = next(
        (s for s in model.components.values() if isinstance(s, EncoderSpec) and s.kind == "vision"),
        None,
    )
    usual = Images()
    plain = np.array([_is_text(name) for name in requests.classes], dtype=bool)[requests.klass]
    found = []
    for is_text in (True, False):
        rows = np.flatnonzero(plain == is_text)
        if len(rows) == 0:
            continue
        count = media = 0.0
        if not is_text:
            if encoder is None:
                raise InputError(
                    f"{model.name} takes no images, and the workload has some",
                    hint="take a model with a vision encoder, or a workload of text",
                )
            # A request with images that does not say how many brings one.
            count = 1.0
            if requests.items is not None:
                count = float(np.maximum(1, requests.items[rows]).mean())
            media = count * encoder.image_tokens(usual.height_px, usual.width_px)
        prompt, answer = (a[rows].astype(np.float64) for a in (requests.input, requests.output))
        text = max(1.0, float(prompt.mean()) - media)
        found.append(
            RequestClass.parse(
                {
                    "name": "text" if is_text else "image+text",
                    "share": len(rows) / len(requests),
                    "input_tokens": text,
                    "output_tokens": max(1.0, float(answer.mean())),
                    # Prompts vary by as many tokens as they do, whatever part of them is text.
                    "input_cv": _spread(prompt, text),
                    "output_cv": _spread(answer, float(answer.mean())),
                    "images": None if is_text else Images.parse({"count": count}),
                    "ttft_s": ttft_s,
                    "tpot_s": tpot_s,
                }
            )
        )
    return tuple(found)


def _is_text(name: str) -> bool:
    """Whether requests of a workload's class are text alone; images are the only media that may come."""
    brings: tuple[str, ...] = ("text",)
    wants: tuple[str, ...] = ("text",)
    if name != TEXT:
        try:
            brings, wants = parse_class_name(name)
        except InputError:
            brings = (name,)
    if set(brings) - {"text", "image"} or wants != ("text",):
        raise InputError(
            f"the workload has requests of class '{name[:60]}', and says nothing of their sizes",
            hint="write the classes into the fleet file; workloads have text and images",
        )
    return "image" not in brings


def _spread(values: np.ndarray[tuple[int], np.dtype[np.float64]], mean: float) -> float:
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


def text_lengths(model: ModelSpec, classes: Sequence[RequestClass], attainment: float) -> Lengths:
    """Return the same for classes of text; the longest prompts that must keep the promise are of any class.

    `attainment` is the share of requests that must keep it where a class says none.
    """
    tail = max(
        prompt_quantile(llm_lengths(model, klass), klass.attainment or attainment)
        for klass in classes
    )
    lengths = lengths_of(model, tuple(classes))
    return lengths.model_copy(update={"input_tail": tail}) if len(classes) > 1 else lengths


def is_plain(model: ModelSpec, classes: Sequence[RequestClass]) -> bool:
    """Return whether all classes need the llm alone and have the same promises, as a plain service's."""
    promises = {(klass.ttft_s, klass.tpot_s) for klass in classes}
    ways = {way for klass in classes for way in phase_ways(model, klass, "together")}
    return (
        model.has_llm
        and ways == {(model.llm_name,)}
        and len(promises) == 1
        and not any(promise is None for pair in promises for promise in pair)
    )


def promises_of(classes: tuple[RequestClass, ...]) -> tuple[float, float]:
    """Return the loosest promises of any class, seconds to the first text and per token."""
    first = [klass.ttft_s for klass in classes if klass.ttft_s is not None]
    later = [klass.tpot_s for klass in classes if klass.tpot_s is not None]
    return max(first, default=NO_PROMISE_S[0]), max(later, default=NO_PROMISE_S[1])


def paths_of(
    document: FleetDocument,
    here: tuple[str, ...],
    entry: ServiceSpec,
    model: ModelSpec,
    classes: Sequence[RequestClass],
) -> tuple[tuple[str, ...], ...]:
    """Return the paths that a service allows: parts of each executor in the order of the model.

    Every path is one that some class can go, and every class has one.
    """
    order = model.graph.parts()
    paths: dict[tuple[str, ...], int] = {}
    for number, path in enumerate(entry.paths or ()):
        steps = []
        for at, executor in enumerate(path):
            with document.at(*here, "paths", number, at):
                parts = [part.strip() for part in executor.split("+")]
                for part in parts:
                    if part not in order:
                        raise UnknownNameError(f"part of {model.name}", part, order)
                if parts_overlap(parts):
                    raise InputError(f"'{executor}' has a part twice", hint="name each part once")
                steps.append("+".join(sorted(parts, key=order.index)))
        if not steps:
            hint = "name its executors, as in [vision, llm]"
            raise document.error("a path without executors", *here, "paths", number, hint=hint)
        if tuple(steps) in paths:
            first = paths[tuple(steps)]
            message = f"the same as path {first}"
            raise document.error(message, *here, "paths", number, hint="leave it out")
        paths[tuple(steps)] = number
    if paths:
        _check_paths(document, here, entry, model, classes, tuple(paths))
    return tuple(paths)


def _check_paths(
    document: FleetDocument,
    here: tuple[str, ...],
    entry: ServiceSpec,
    model: ModelSpec,
    classes: Sequence[RequestClass],
    paths: Sequence[tuple[str, ...]],
) -> None:
    has = [{part for executor in path for part in executor.split("+")} for path in paths]
    useful = set()
    for klass in classes:
        ways = phase_ways(model, klass, entry.phases)
        goes = [n for n, parts in enumerate(has) if any(parts >= set(way) for way in ways)]
        if not goes:
            needs = " or ".join(", ".join(way) for way in ways)
            raise document.error(
                f"class '{klass.name}' can go none of the paths: it needs {needs}",
                *here,
                "paths",
                hint="add a path whose executors have these parts",
            )
        useful |= set(goes)
    for number in range(len(paths)):
        if number not in useful:
            message = "no class can go this path: it lacks parts that all of them need"
            raise document.error(
                message, *here, "paths", number, hint="complete it, or leave it out"
            )


def cores_of(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec, model: ModelSpec
) -> tuple[tuple[str, float], ...]:
    """Return the CPU cores that components need, by component."""
    for component in entry.cores:
        with document.at(*here, "cores", component):
            if component not in model.components:
                raise UnknownNameError(f"component of {model.name}", component, model.components)
    return tuple(sorted(entry.cores.items()))


def sharing_of(
    document: FleetDocument, here: tuple[str, ...], entry: ServiceSpec, model: ModelSpec
) -> dict[str, object]:
    """Return with whose executors a service shares its own, as `Service` has it."""
    if isinstance(entry.share, bool):
        return {"share": entry.share}
    for component, name in entry.share.items():
        with document.at(*here, "share", component):
            if component not in model.components:
                raise UnknownNameError(f"component of {model.name}", component, model.components)
            slug(name)
    return {"share_as": tuple(sorted(entry.share.items()))}


def check_sharing(document: FleetDocument, catalog: Catalog, services: Iterable[Service]) -> None:
    """Refuse components of one name that are not the same, and a name that is one service's alone."""
    first: dict[tuple[str, str], Service] = {}
    alone: dict[tuple[str, str], Service] = {}
    for service in services:
        for component, name in service.share_as:
            known = first.setdefault((name, component), service)
            if known is service:
                alone[name, component] = service
                continue
            alone.pop((name, component), None)
            specs = [catalog.model(one.model).components[component] for one in (known, service)]
            if specs[0] != specs[1]:
                raise document.error(
                    f"{component} of {service.model} has other shapes than that of {known.model}",
                    *("services", service.name, "share", component),
                    hint="give them names of their own",
                )
    for (name, component), service in alone.items():
        raise document.error(
            f"no other service has a component {component} named {name}",
            *("services", service.name, "share", component),
            hint="name that of another service so, or leave it out",
        )


def rates_of(
    document: FleetDocument,
    catalog: Catalog,
    here: tuple[str, ...],
    entry: ServiceSpec,
    model: ModelSpec,
) -> tuple[MeasuredRate, ...]:
    """Return what was measured of parts, checked against the model and the catalog."""
    found = []
    for written, places in entry.rates.items():
        with document.at(*here, "rates", written):
            part = _measured_parts(model, written)
            if not places:
                raise InputError("measured nowhere", hint="leave it out, or say on which GPUs")
        seen: dict[str, str] = {}
        for place, rates in places.items():
            with document.at(*here, "rates", written, place):
                on = catalog.node(place).id if ":" in place else catalog.gpu(place).name
                if on in seen:
                    raise InputError(f"the same as {seen[on]}", hint="give each place once")
                if not rates:
                    raise InputError("nothing was measured", hint="leave it out, or add a rate")
                if "+" in part and set(rates) != {"request"}:
                    raise InputError(
                        "a whole executor has a rate of requests",
                        hint="write {request: RATE}, counted over the mix of classes",
                    )
            seen[on] = place
            for unit, rate in rates.items():
                with document.at(*here, "rates", written, place, unit):
                    if isinstance(rate, dict):
                        found.append(_batches(model, part, on, unit, rate))
                        continue
                    if rate < _SLOWEST_PER_S:
                        raise InputError(
                            f"a rate of {rate:g}/s is none", hint="leave it out, or check its unit"
                        )
                found.append(MeasuredRate(part=part, on=on, per_s=rate, unit=unit))
    return tuple(found)


def _measured_parts(model: ModelSpec, written: str) -> str:
    """Return the part, or the parts of an executor, that something was measured of, in the model's order."""
    order = model.graph.parts()
    parts = [part.strip() for part in written.split("+")]
    for part in parts:
        if part not in order:
            raise UnknownNameError(f"part of {model.name}", part, order)
    if parts_overlap(parts):
        raise InputError(f"'{written}' has a part twice", hint="name each part once")
    return "+".join(sorted(parts, key=order.index))


def _batches(
    model: ModelSpec, part: str, on: str, unit: Unit, seconds: Mapping[int, float]
) -> MeasuredRate:
    if "+" in part or autoregressive_spec(model, part) is not None:
        raise InputError(
            f"{part} works on tokens, not on batches of whole requests",
            hint="give its rate, as in {request: 2/s}",
        )
    return rate_of_batches(part, on, unit, seconds)
