"""Nodes with several ranks give, token for token, what transformers gives on the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs the extra 'engine'")

from tests.engine.cluster import Cluster, NodeSetup
from tests.engine.models import ARCHITECTURES, LAYERS
from tests.engine.test_exact import PROMPTS, ask, check

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 1)])
def test_every_architecture_is_exact_over_ranks(
    tiny: Callable[[str], Any], architecture: str, sizes: tuple[int, int]
) -> None:
    model = tiny(architecture)
    setups = [NodeSetup(0, 1, tp=sizes[0]), NodeSetup(1, 4, tp=sizes[1])]
    cluster = Cluster(model.folder, LAYERS, setups, seed=3)
    asked = ask(cluster, [(4, 12, 9), (7, 10, 0), (9, 12, 3), (4, 8, 0)])
    check(cluster, asked, model)
