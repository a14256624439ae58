"""Models in ONNX, opened for the device and the cores a component was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.components.base import Setup
from atoll.core.errors import InputError, MissingDependencyError


def open_onnx(path: Path, setup: Setup) -> Any:
    """Return onnxruntime's session for a model file; it keeps `setup.threads` cores busy while it runs."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("onnxruntime", "components", needed_for=path.name) from error
    providers: list[Any] = ["CPUExecutionProvider"]
    kind, _, number = setup.device.partition(":")
    if kind == "cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise InputError(
                f"this onnxruntime has no CUDA, and {path.name} should run on {setup.device}",
                field="device",
                hint="pip install onnxruntime-gpu, or say cpu",
            )
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": int(number or 0)}))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = setup.threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(str(path), options, providers=providers)
