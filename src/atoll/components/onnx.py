"""ONNX models, with the onnxruntime of the extra "components"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from atoll.core.errors import InputError, MissingDependencyError, shorten
from atoll.engine.engine_errors import WeightsError

_QUIET = 4
"""onnxruntime's level "fatal": what fails is raised anyway, and what it warns of nobody here can mend."""


def need_package(package: str, needed_for: str) -> Any:
    """Import a package of the extra "components", or say what to install."""
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependencyError(package, "components", needed_for=needed_for) from error


class NeuralNetwork(Protocol):
    """A network that computes arrays from arrays, both by name."""

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        """Run once."""
        ...


class OnnxModel:
    """A loaded model: arrays in, arrays out, on `threads` cores. May be used by several threads.

    device: "cpu", or "cuda:N" where the installed onnxruntime can; small models in int8 are better off on
    cores. keep_memory: keep working memory between runs, which is a little faster. Without, a run over long
    inputs gives back what it took.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int = 1,
        device: str = "cpu",
        keep_memory: bool = True,
        needed_for: str,
    ) -> None:
        runtime = need_package("onnxruntime", needed_for)
        providers = _providers(runtime, device, needed_for)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _QUIET
        options.use_deterministic_compute = True
        options.enable_cpu_mem_arena = keep_memory
        # Threads that spin while they wait would take the cores of the executor's neighbours.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # onnxruntime's errors have no common type
            raise WeightsError(
                f"not a model that onnxruntime can load: {shorten(str(error), 160)}", path=path.name
            ) from error
        self.inputs: tuple[str, ...] = tuple(one.name for one in self._session.get_inputs())
        self.outputs: tuple[str, ...] = tuple(one.name for one in self._session.get_outputs())

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata that the model's makers wrote into it."""
        found: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        return found

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str] | None = None) -> list[Any]:
        """Run once; returns the outputs named, or all of them in the model's order."""
        result: list[Any] = self._session.run(outputs, dict(inputs))
        return result


def _providers(runtime: Any, device: str, needed_for: str) -> list[Any]:
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        raise InputError(
            f"this onnxruntime has no CUDA, and {needed_for} should run on {device}",
            field="device",
            hint="pip install onnxruntime-gpu, or say cpu",
        )
    return [("CUDAExecutionProvider", {"device_id": int(number or 0)}), "CPUExecutionProvider"]
