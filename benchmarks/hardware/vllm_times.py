"""Where vLLM's time goes: a plugin of it that notes every step, every encoder in one, and every picture read.

vLLM loads it in all of its processes (entry point `vllm.general_plugins`, see `write_plugin`). Each process
writes lines of JSON to a file of its own in the folder that $ATOLL_VLLM_TIMES names:

    {"what": "step", "at_s": …, "tokens": …, "requests": …, "items": …, "encoder_s": …}
    {"what": "read" | "prepare", "at_s": …, "took_s": …, "cpu_s": …}

`at_s` is when it began, in seconds since 1970; of a step that is when the GPU came to it, so the next step's
says when it was over. `items` are the pictures that its encoder worked on, which is part of the step. "read"
is a picture decoded from its URL, "prepare" one cut into patches by the processor of the model.

This file imports nothing of Atoll's: it runs in processes of vLLM.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "ATOLL_VLLM_TIMES"
_NAME = "atoll_vllm_times"


def write_plugin(folder: Path) -> None:
    """Write what makes vLLM load this module, if `folder` and this repository are on the Python path."""
    about = folder / f"{_NAME}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\n{_NAME} = {__name__}:register\n"
    (about / "entry_points.txt").write_text(entry)


class _Notes:
    """Lines of one process."""

    def __init__(self, folder: str) -> None:
        self._stream = (Path(folder) / f"{os.getpid()}.jsonl").open("a", buffering=1)
        self._lock = threading.Lock()

    def write(self, **line: Any) -> None:
        with self._lock:
            self._stream.write(json.dumps(line) + "\n")


class _Steps:
    """Marks of a runner's steps; on a GPU they are events of its stream, read when they have come."""

    def __init__(self, notes: _Notes, on_gpu: bool) -> None:
        self._notes, self._on_gpu = notes, on_gpu
        self._open: collections.deque[dict[str, Any]] = collections.deque()
        self._base: tuple[Any, float] | None = None
        self.line: dict[str, Any] = {}

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.time()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._base is None:
            event.synchronize()
            self._base = event, time.time()
        return event

    def begin(self, order: Any) -> None:
        """Note a step as it begins, and write those that are over."""
        counts = order.num_scheduled_tokens
        self.line = {"mark": self.mark(), "tokens": sum(counts.values()), "requests": len(counts)}
        self._open.append(self.line)
        while len(self._open) > 1 and self._is_past(self._open[1]["mark"]):
            self._write(self._open.popleft())

    def _is_past(self, mark: Any) -> bool:
        return not self._on_gpu or bool(mark.query())

    def _at_s(self, mark: Any) -> float:
        if not self._on_gpu:
            return float(mark)
        assert self._base is not None
        event, at_s = self._base
        return float(at_s + 1e-3 * event.elapsed_time(mark))

    def _write(self, line: dict[str, Any]) -> None:
        begun, ended = line.get("encoder", (None, None))
        took_s = 0.0 if begun is None else self._at_s(ended) - self._at_s(begun)
        self._notes.write(
            what="step",
            at_s=round(self._at_s(line["mark"]), 6),
            tokens=line["tokens"],
            requests=line["requests"],
            items=line.get("items", 0),
            encoder_s=round(took_s, 6),
        )


def register() -> None:
    """Have this process of vLLM write notes; called by vLLM, maybe more than once."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and not hasattr(register, "notes"):
        register.notes = _Notes(folder)  # type: ignore[attr-defined]
        _note_reading(register.notes)  # type: ignore[attr-defined]
        _note_steps(register.notes)  # type: ignore[attr-defined]


def _note_reading(notes: _Notes) -> None:
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.renderers.base import BaseRenderer

    def timed(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def run(*given: Any, **named: Any) -> Any:
            at_s, begun_s, cpu_s = time.time(), time.perf_counter(), time.thread_time()
            try:
                return work(*given, **named)
            finally:
                took_s, cpu_s = time.perf_counter() - begun_s, time.thread_time() - cpu_s
                notes.write(
                    what=what, at_s=round(at_s, 6), took_s=round(took_s, 6), cpu_s=round(cpu_s, 6)
                )

        return run

    connector: Any = MediaConnector
    connector._load_data_url = timed("read", connector._load_data_url)
    renderer: Any = BaseRenderer
    renderer._process_multimodal = timed("prepare", renderer._process_multimodal)


def _note_steps(notes: _Notes) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    execute, encode = runner.execute_model, runner._execute_mm_encoder

    @functools.wraps(execute)
    def execute_model(self: Any, order: Any, *given: Any, **named: Any) -> Any:
        if not hasattr(self, "_atoll_steps"):
            self._atoll_steps = _Steps(notes, self.device.type == "cuda")
        self._atoll_steps.begin(order)
        return execute(self, order, *given, **named)

    @functools.wraps(encode)
    def execute_mm_encoder(self: Any, order: Any, *given: Any, **named: Any) -> Any:
        items = sum(len(each) for each in order.scheduled_encoder_inputs.values())
        if not items:
            return encode(self, order, *given, **named)
        steps = self._atoll_steps
        begun = steps.mark()
        result = encode(self, order, *given, **named)
        steps.line |= {"items": items, "encoder": (begun, steps.mark())}
        return result

    runner.execute_model, runner._execute_mm_encoder = execute_model, execute_mm_encoder
