from __future__ import annotations

import pytest

from atoll.core.errors import UnknownNameError
from atoll.fabric.registry.peers import Peer
from atoll.fabric.registry.queries import Query, state_of
from atoll.fabric.registry.records import Gpu, Hardware, NodeService, SessionState
from tests.fabric.registry.network import metadata

GB = 10**9


def peer(*, state: SessionState = SessionState.SERVING, alive: bool = True, **said: object) -> Peer:
    described = {
        "name": "lab/gpu1",
        "provider": "Uni",
        "region": "eu-west-1",
        "site": "hall",
        "engine": "vllm",
        "stability": "batch",
        "hardware": Hardware(gpus=(Gpu("A100-80G", 2, 85 * GB), Gpu("L4", 1, 24 * GB))),
        "services": (
            NodeService(model="meta/llama-70b", aliases=("llama",), precision="bf16"),
            NodeService(model="qwen3-8b", precision="fp8"),
        ),
        **said,
    }
    found = metadata("m001", **described)
    sid = "m001-00000000000000aa"
    return Peer(sid, "m001", found.name, found.provider, True, state, found, alive, 0.0)


@pytest.mark.parametrize(
    ("query", "lacks"),
    [
        (Query(), None),
        (Query(gpus=("a100",)), None),
        (Query(gpus=("A10",)), "gpu"),
        (Query(gpus=("H100", "L4")), None),
        (Query(min_vram_bytes=40 * GB), None),
        (Query(min_vram_bytes=90 * GB), "gpu"),
        (Query(gpus=("L4",), min_vram_bytes=40 * GB), "gpu"),
        (Query(gpus=("A100",), min_gpus=2), None),
        (Query(gpus=("A100",), min_gpus=3), "gpu"),
        (Query(min_gpus=3), None),
        (Query(models=("llama",)), None),
        (Query(models=("META/*",)), None),
        (Query(models=("llama-70b",)), "model"),
        (Query(precisions=("FP8",)), None),
        (Query(models=("llama",), precisions=("fp8",)), "model"),
        (Query(providers=("uni",)), None),
        (Query(providers=("un",)), "provider"),
        (Query(regions=("eu",)), None),
        (Query(regions=("eu-west-10",)), "region"),
        (Query(sites=("hall", "barn")), None),
        (Query(sites=("barn",)), "site"),
        (Query(engines=("sglang",)), "engine"),
        (Query(roles=("worker",)), None),
        (Query(roles=("hub",)), "role"),
        (Query(names=("lab",)), None),
        (Query(names=("m001-00000000000000aa",)), None),
        (Query(names=("la",)), "name"),
        (Query(min_stability="spot"), None),
        (Query(min_stability="batch"), None),
        (Query(min_stability="standard"), "stability"),
        (Query(states=("serving",)), None),
        (Query(states=("join", "silent")), "state"),
    ],
    ids=str,
)
def test_a_query_finds_what_it_says(query: Query, lacks: str | None) -> None:
    assert query.lacks(peer()) == lacks


def test_what_a_node_does_not_say_counts_against_it() -> None:
    bare = peer(region="", hardware=Hardware(), services=())
    assert Query(regions=("eu",)).lacks(bare) == "region"
    assert Query(min_vram_bytes=1).lacks(bare) == "gpu"
    assert Query(models=("*",)).lacks(bare) == "model"


def test_a_node_without_a_token_is_silent() -> None:
    assert state_of(peer(alive=False)) == "silent"
    assert state_of(peer(alive=False, state=SessionState.LEFT)) == "left"
    assert Query(states=("silent",)).lacks(peer(alive=False)) is None


@pytest.mark.parametrize(
    "wrong", [{"states": ("servin",)}, {"min_stability": "stable"}, {"roles": ("works",)}]
)
def test_names_that_no_node_could_have_are_refused(wrong: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(UnknownNameError, match="known:"):
        Query(**wrong)  # type: ignore[arg-type]
