"""What the engine's tests share. Those that need torch are skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Build each tiny model once a session."""
    torch = pytest.importorskip("torch", reason="needs the extra 'engine'")
    pytest.importorskip("transformers", reason="needs the extra 'engine'")
    torch.set_num_threads(1)
    from tests.engine.models import Tiny

    made: dict[str, Any] = {}

    def make(architecture: str) -> Any:
        if architecture not in made:
            made[architecture] = Tiny(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return make
