from __future__ import annotations

import pickle
from types import ModuleType

import pytest

import atoll.catalog
import atoll.plan
import atoll.solve
from atoll.catalog.catalog import Catalog
from atoll.catalog.describe import UNKNOWN, describe
from atoll.catalog.facts import Fact
from atoll.catalog.frozenmap import FrozenMap
from atoll.catalog.name_lookup import fold, index_names, look_up
from atoll.core.errors import UnknownNameError


@pytest.mark.parametrize("package", [atoll.catalog, atoll.plan, atoll.solve])
def test_a_package_names_its_nouns(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = package.Nothing


def test_default_is_one_object() -> None:
    assert Catalog.default() is Catalog.default()
    assert Catalog.default() == Catalog()
    assert Catalog.default() != "catalog"
    gpus, models, prices = (
        len(found)
        for found in (Catalog.default().gpus, Catalog.default().models, Catalog.default().prices)
    )
    assert repr(Catalog.default()) == f"Catalog({gpus} gpus, {models} models, {prices} prices)"


def test_a_catalog_of_ones_own() -> None:
    own = Catalog(gpus={"L4": Catalog.default().gpu("L4")}, node_rules={})
    assert list(own.gpus) == ["L4"]
    with pytest.raises(UnknownNameError, match="known: L4"):
        own.gpu("H100")
    with pytest.raises(UnknownNameError):
        own.node("L4:2")
    assert own != Catalog.default()


class TestNames:
    def test_fold(self) -> None:
        assert fold("RTX 3090") == fold("rtx-3090") == fold("RTX_3090") == "rtx3090"

    def test_canonical_names_win_over_aliases(self) -> None:
        index = index_names([("a", ["b", "c"]), ("b", []), ("d", ["c"])])
        assert index == {"a": "a", "b": "b", "c": "a", "d": "d"}
        assert look_up("letter", "C", {"a": 1}, index) == 1

    def test_no_two_entries_share_a_name(self) -> None:
        catalog = Catalog.default()
        for table in (catalog.gpus, catalog.models):
            owners: dict[str, set[str]] = {}
            for entry in table.values():
                for name in (entry.name, *entry.aliases):
                    owners.setdefault(fold(name), set()).add(entry.name)
            assert {name: who for name, who in owners.items() if len(who) > 1} == {}


class TestFrozenMap:
    def test_is_a_mapping(self) -> None:
        frozen = FrozenMap({"a": 1, "b": 2})
        assert dict(frozen) == {"a": 1, "b": 2}
        assert (len(frozen), "a" in frozen, frozen.get("z")) == (2, True, None)
        assert repr(frozen) == "FrozenMap({'a': 1, 'b': 2})"

    def test_equality_hash_pickle(self) -> None:
        frozen = FrozenMap({"a": 1, "b": 2})
        assert frozen == FrozenMap({"b": 2, "a": 1})
        assert hash(frozen) == hash(FrozenMap({"b": 2, "a": 1}))
        assert frozen != {"a": 1, "b": 2}
        assert pickle.loads(pickle.dumps(frozen)) == frozen

    def test_cannot_be_written(self) -> None:
        frozen = FrozenMap({"a": 1})
        with pytest.raises(TypeError):
            frozen["a"] = 2  # type: ignore[index]

    def test_the_source_may_change_later(self) -> None:
        source = {"a": 1}
        frozen = FrozenMap(source)
        source["a"] = 2
        assert frozen["a"] == 1


class TestFacts:
    def test_confidence_is_checked(self) -> None:
        with pytest.raises(ValueError, match="sure"):
            Fact(1, "somewhere", "sure")  # type: ignore[arg-type]


class TestDescribe:
    @pytest.mark.parametrize("name", [*Catalog.default().gpus, *Catalog.default().models])
    def test_every_shape_has_a_source(self, name: str) -> None:
        found = describe(Catalog.default(), name)
        absent = {"nvlink_bytes_per_s", "pcie_bytes_per_s", "fp8_tflops", "fp4_tflops"}
        bare = {"aliases", "hf_id", "note", "graph", "like", *absent}
        for row in found.rows:
            assert row.source is not None or row.field in bare, row

    def test_unknown_is_said(self) -> None:
        rows = {row.field: row for row in describe(Catalog.default(), "qwen2.5-omni-7b").rows}
        assert rows["talker.params"].value == UNKNOWN
        assert rows["total_params"].value == UNKNOWN
        assert rows["talker.heads"].confidence == "low"

    def test_latents_states_and_windows_are_written_out(self) -> None:
        catalog = Catalog.default()
        deepseek = {row.field: row.value for row in describe(catalog, "deepseek-v3").rows}
        assert (deepseek["llm.mla.kv_rank"], deepseek["llm.mla.rope_dim"]) == (512, 64)
        assert deepseek["llm.windows"] == "full attention in every layer"
        assert "llm.state_bytes_per_sequence" not in deepseek
        following = {row.field: row.value for row in describe(catalog, "qwen3-next").rows}
        assert following["llm.windows"] == "full attention in 12 of 48 layers, a state in 36"
        assert following["llm.delta.value_heads"] == 32
        assert following["llm.delta.state_dtype"] == "fp32 (32 bit)"
        assert following["llm.state_bytes_per_sequence"] == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
        scout = {row.field: row.value for row in describe(catalog, "llama-4-scout").rows}
        assert scout["llm.windows"] == "8192 tokens in 36 of 48 layers (0, 1, 2, 4, ...)"

    def test_kinds(self) -> None:
        catalog = Catalog.default()
        kinds = [describe(catalog, n).kind for n in ("l4", "L4:2", "phi-4", "pcie4", "links")]
        assert kinds == ["gpu", "node", "model", "interconnect", "links"]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("H10", "unknown name in the catalog 'H10'; did you mean H100"),
            ("phi-4@fp7", "unknown dtype 'fp7'"),
            ("L4:99", "unknown node type"),
        ],
    )
    def test_unknown_names(self, name: str, message: str) -> None:
        with pytest.raises(UnknownNameError, match=message):
            describe(Catalog.default(), name)


def test_precisions_are_worked_out_once() -> None:
    catalog = Catalog.default()
    spec = catalog.model("llama-3.1-8b@fp8")
    assert catalog.model("llama-3.1-8b@fp8") is spec
    assert catalog.model("llama-3.1-8b@int4") != spec
    assert catalog.model("llama-3.1-8b").llm.weight_bytes > spec.llm.weight_bytes
