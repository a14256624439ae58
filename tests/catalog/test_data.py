"""The packaged data files: readable, without duplicates, with public sources only."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files

import pytest

from atoll.catalog.catalog import Catalog
from atoll.catalog.resources import data_text
from atoll.core.files import parse_yaml

YAML = ("gpus.yaml", "interconnects.yaml", "links.yaml", "models.yaml", "nodes.yaml")
NOT_PUBLIC = re.compile(
    r"read_file|find_string|\bid \d{6,}|\bids \d{6,}|(?:^|[\s\"'(])/(?:\w+/)+\w+"
)


@pytest.mark.parametrize("name", YAML)
def test_no_key_twice(name: str) -> None:
    parse_yaml(data_text(name), path=name)


@pytest.mark.parametrize("name", [*YAML, "prices.csv", "README.md"])
def test_sources_are_public(name: str) -> None:
    assert NOT_PUBLIC.search(data_text(name)) is None


def test_every_file_is_described() -> None:
    readme = data_text("README.md")
    for entry in (files("atoll.catalog") / "data").iterdir():
        assert entry.name == "README.md" or f"`{entry.name}`" in readme


def test_every_model_has_a_source_and_every_fact_a_shape() -> None:
    for model in Catalog.default().models.values():
        assert len(model.source) > 10
        for key, fact in model.facts.items():
            assert len(fact.source) > 10
            if not key.startswith("reference."):
                component, _, attribute = key.partition(".")
                assert hasattr(model.components[component], attribute)


def test_import_is_light() -> None:
    script = (
        "import sys, atoll.catalog.catalog as c; c.Catalog.default().gpu('L4');"
        "print([m for m in ('pydantic', 'numpy', 'torch', 'rich', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
