"""Who may serve: policies alone, and what two of them mean together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InputError
from atoll.runtime.openai import ApiError
from atoll.runtime.pool.policy import STABILITIES, ModelOffer, Policy, fallbacks, precision_bits

names = st.sampled_from(["a", "b", "c"])
some = st.none() | st.lists(names, max_size=3).map(tuple)
policies = st.builds(
    Policy,
    providers=some,
    regions=st.none() | st.lists(st.sampled_from(["eu", "eu-west", "us"]), max_size=2).map(tuple),
    min_precision=st.none() | st.sampled_from(["bf16", "fp8", "int4"]),
    min_context=st.none() | st.integers(1, 4),
    gpus=st.none() | st.lists(st.sampled_from(["A100", "A100-80G", "H100"]), max_size=2).map(tuple),
    stability=st.none() | st.sampled_from(STABILITIES),
    nodes=st.none() | st.lists(st.sampled_from(["lab", "lab/n1", "x"]), max_size=2).map(tuple),
)
offers = st.builds(
    ModelOffer,
    node=st.sampled_from(["lab/n1", "lab/n2", "x", ""]),
    provider=names,
    verified=st.booleans(),
    region=st.sampled_from(["eu-west", "eu", "us-east", ""]),
    precision=st.sampled_from(["bf16", "fp8_e4m3", "Q4_K_M", "unknown"]),
    context=st.none() | st.integers(1, 5),
    gpus=st.lists(st.sampled_from(["A100-80G", "NVIDIA H100 SXM"]), max_size=2).map(tuple),
    stability=st.sampled_from([*STABILITIES, "odd"]),
)


@given(policies, policies, offers)
def test_both_together_allow_what_both_allow(one: Policy, two: Policy, offer: ModelOffer) -> None:
    both = one.narrow(two).refusal(offer) is None
    assert both == (one.refusal(offer) is None and two.refusal(offer) is None)
    assert both == (two.narrow(one).refusal(offer) is None)
    assert one.narrow(None) == one


def test_what_is_not_said_counts_against_a_node() -> None:
    nobody = ModelOffer()
    for field, value, reason in (
        ("providers", ("ETH",), "provider"),
        ("regions", ("eu",), "region"),
        ("min_precision", "int4", "precision"),
        ("min_context", 1, "context"),
        ("gpus", ("A100",), "gpu"),
        ("nodes", ("lab",), "node"),
        ("stability", "reserved", "stability"),
    ):
        assert Policy.parse({field: value}).refusal(nobody) == reason
    assert Policy().refusal(nobody) is None
    assert Policy(providers=()).refusal(ModelOffer(provider="")) == "provider"


def test_a_provider_that_no_certificate_names_is_not_trusted() -> None:
    policy = Policy(providers=("ETH",))
    assert policy.refusal(ModelOffer(provider="ETH")) is None
    assert policy.refusal(ModelOffer(provider="ETH", verified=False)) == "provider"


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16),
        ("FP8_E4M3", 8),
        ("Q4_K_M", 4),
        ("iq3_xs", 3),
        ("w4a16", 4),
        ("mxfp4", 4),
        ("awq", 4),
        ("f32", 32),
        ("unknown", 0),
        ("", 0),
    ],
)
def test_precisions(name: str, bits: int) -> None:
    assert precision_bits(name) == bits


def test_headers() -> None:
    assert Policy.from_headers({b"accept": b"*/*"}) is None
    policy = Policy.from_headers(
        {b"x-atoll-providers": b"ETH, EPFL", b"x-atoll-min-context": b"8192"}
    )
    assert policy == Policy(providers=("ETH", "EPFL"), min_context=8192)
    assert fallbacks({b"x-atoll-fallback": b"a, b"}) == ("a", "b")
    assert fallbacks({}) == ()
    for header, value in (
        (b"x-atoll-providers", b""),
        (b"x-atoll-providers", b"\xff"),
        (b"x-atoll-providers", b"," * 100),
        (b"x-atoll-min-context", b"-1"),
        (b"x-atoll-min-context", b"0"),
        (b"x-atoll-min-context", "\u0663".encode()),
        (b"x-atoll-min-precision", b"good"),
        (b"x-atoll-stability", b"solid"),
    ):
        with pytest.raises(ApiError) as caught:
            Policy.from_headers({header: value})
        assert caught.value.status == 400
        assert caught.value.param == header.decode()
    with pytest.raises(ApiError):
        fallbacks({b"x-atoll-fallback": b"a,,b"})
    with pytest.raises(InputError, match="min_precision"):
        Policy.parse({"min_precision": "best"})


@given(policies)
def test_a_policy_survives_json(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json()) == policy
