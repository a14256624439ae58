"""Behaviours that clients of others need, on real nodes behind a gateway, one test for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compat import client_checks
from tests.compat.client_checks import CHECKS, ClientSite
from tests.seeds import slow_except
from tests.served_fleet import Running

pytestmark = pytest.mark.engine


# What these ask for is also asked of the instance itself, in its own shape.
ASKED_ELSEWHERE = (
    client_checks.vllm_prompt_logprobs,
    client_checks.vllm_zero_logprobs,
    client_checks.vllm_continuous_usage,
    client_checks.llamacpp_grammar,
    client_checks.llamacpp_json_schema,
    client_checks.lm_eval_scores_prompts,
)


@pytest.mark.parametrize(
    "check",
    slow_except([check for check in CHECKS if check not in ASKED_ELSEWHERE], CHECKS),
    ids=lambda check: check.__name__,
)
def test_client(running: Running, check: Callable[[ClientSite], None]) -> None:
    for package in ("openai", "anthropic"):
        pytest.importorskip(package)
    check(ClientSite(running.fleet.url, "tiny"))
