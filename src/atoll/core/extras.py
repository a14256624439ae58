"""The optional packages of Atoll: which extra brings what."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from atoll.core.errors import MissingDependencyError

Extra = Literal["serve", "fabric", "engine", "components", "nixl"]
_PACKAGES: dict[Extra, tuple[str, ...]] = {
    "serve": ("httptools", "msgspec", "prometheus_client", "python_multipart"),
    "fabric": ("zenoh", "cryptography", "msgspec"),
    "engine": ("torch", "transformers", "zmq", "tokenizers"),
    "components": ("onnxruntime", "hibari", "PIL"),
    "nixl": ("nixl",),
}
_NEEDED_FOR: dict[Extra, str] = {
    "serve": "serving",
    "fabric": "a fabric",
    "engine": "the stage engine",
    "components": "any-to-any models",
    "nixl": "handing arrays over by NIXL",
}


def require_extras(*extras: Extra) -> None:
    """Raise MissingDependencyError, which says what to install, where packages of an extra are missing."""
    for extra in extras:
        for package in _PACKAGES[extra]:
            if find_spec(package) is None:
                raise MissingDependencyError(package, extra, needed_for=_NEEDED_FOR[extra])
