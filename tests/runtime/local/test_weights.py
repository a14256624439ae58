"""Weights of a plan: which it needs, where they come from, and that others are not served for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.catalog import Catalog
from atoll.core.errors import InputError, UnknownNameError, UsageError
from atoll.runtime.local.weights import (
    STAND_IN_MODEL,
    NeededWeights,
    WeightSource,
    check_weights,
    choose_sources,
    list_needed,
)
from atoll.runtime.pool.member import Backend, Member
from atoll.runtime.pool.outliers import Outliers, OutlierSettings
from tests.runtime.local.test_placing import instance, plan

SMALL = "pypi://small"
CATALOG = Catalog.default()
PLAN = plan(instance([(0, 40), (40, 64)]))


def needed(model: str | None = "qwen3-32b") -> list[NeededWeights]:
    return list_needed({} if model is None else {"chat": model}, ["chat"], CATALOG, PLAN)


def folder(tmp_path: Path, **changes: object) -> Path:
    spec = CATALOG.model("qwen3-32b").llm
    config = {
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return tmp_path


def test_what_is_needed_is_what_was_planned() -> None:
    (chat,) = needed()
    assert (chat.model, chat.layers) == ("qwen3-32b", 64)
    assert chat.described == "chat (qwen3-32b)"
    (unnamed,) = needed(None)
    assert (unnamed.model, unnamed.layers, unnamed.spec) == (None, 64, None)
    (own,) = needed("of-my-own-overlay")
    assert own.spec is None


def test_without_weights_nothing_is_served_and_it_says_how_to_get_them() -> None:
    with pytest.raises(UsageError) as caught:
        choose_sources(needed(), (), SMALL, stand_in=False)
    said = str(caught.value)
    assert "weights are needed: chat (qwen3-32b)" in said
    assert "`models` chat=hf://Qwen/Qwen3-32B" in said
    assert "`stand_in`" in said
    with pytest.raises(UsageError, match="`fleet`"):
        choose_sources(needed(None), (), SMALL, stand_in=False)


def test_a_stand_in_says_instead_of_what() -> None:
    chosen = choose_sources(needed(), (), SMALL, stand_in=True)
    assert chosen == {"chat": WeightSource(SMALL, f"{STAND_IN_MODEL} instead of qwen3-32b")}
    unnamed = choose_sources(needed(None), (), SMALL, stand_in=True)
    assert unnamed["chat"].stand_in == f"{STAND_IN_MODEL} instead of its own model"


@pytest.mark.parametrize("given", ["chat=/weights", "/weights", "hf://Qwen/Qwen3-32B"])
@pytest.mark.parametrize("stand_in", [False, True])
def test_given_weights_are_no_stand_in(given: str, stand_in: bool) -> None:
    chosen = choose_sources(needed(), [given], SMALL, stand_in=stand_in)
    # Of the catalog's own repository it is known where the same weights are as GGUF files.
    gguf = "hf://unsloth/Qwen3-32B-GGUF:BF16" if given.startswith("hf://") else None
    assert chosen == {"chat": WeightSource(given.removeprefix("chat="), gguf=gguf)}


def test_one_source_is_for_all_and_a_later_one_for_its_own() -> None:
    both = list_needed({"a": "qwen3-32b", "b": "qwen3-32b"}, ["a", "b"], CATALOG)
    chosen = choose_sources(both, ["hf://o/n", "b=/m"], SMALL, stand_in=False)
    assert {name: each.source for name, each in chosen.items()} == {"a": "hf://o/n", "b": "/m"}
    part = choose_sources(both, ["b=/m"], SMALL, stand_in=True)
    assert (part["a"].stand_in is not None, part["b"].stand_in) == (True, None)


def test_a_plan_for_the_small_model_gets_it() -> None:
    """It is what was planned for, not a stand-in; in another precision, too."""
    for model in (STAND_IN_MODEL, "HuggingFaceTB/SmolLM2-135M", f"{STAND_IN_MODEL}@fp8"):
        chosen = choose_sources(needed(model), (), SMALL, stand_in=False)
        assert chosen == {"chat": WeightSource(SMALL)}


def test_weights_for_nobody_and_from_nowhere() -> None:
    with pytest.raises(UnknownNameError, match="models"):
        choose_sources(needed(), ["nobody=/x"], SMALL, stand_in=False)
    with pytest.raises(UsageError, match="chat=FOLDER"):
        choose_sources(needed(), ["chat="], SMALL, stand_in=False)


def test_the_right_weights_pass(tmp_path: Path) -> None:
    check_weights(needed()[0], folder(tmp_path))
    check_weights(needed("qwen3-32b@fp8")[0], folder(tmp_path))
    check_weights(needed(None)[0], folder(tmp_path, hidden_size=1))  # nobody says how wide it is


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 30}, "30 layers, and the plan is for 64"),
        ({"hidden_size": 576}, "576 wide"),
        ({"num_attention_heads": 9}, "9 heads"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_weights(needed()[0], folder(tmp_path, **changes))
    assert said in str(caught.value)
    assert "chat (qwen3-32b)" in str(caught.value)
    assert caught.value.hint


def test_sizes_of_models_with_more_than_text_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 30}}))
    with pytest.raises(InputError, match="30 layers"):
        check_weights(needed()[0], tmp_path)


def _headers(stand_in: str) -> bytes:
    backend = Backend(
        id="a", url="http://127.0.0.1:1", models=("m",), metadata={"stand_in": stand_in}
    )
    return Member(backend, Outliers(OutlierSettings())).headers


def test_answers_of_a_stand_in_say_so() -> None:
    assert _headers("small instead of large") == b"x-atoll-stand-in: small instead of large\r\n"
    assert _headers("") == b""


def test_no_other_header_gets_in() -> None:
    assert _headers("x\r\nset-cookie: a=b") == b"x-atoll-stand-in: xset-cookie: a=b\r\n"
    assert len(_headers("x" * 10_000)) < 300
