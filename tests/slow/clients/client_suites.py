"""Clients of others against a gateway over the stage engine: every behaviour that they need.

A tiny model is served as `atoll serve` does it, and every check of `client_checks` is asked of it, by the
clients of OpenAI and Anthropic themselves. LiteLLM runs in an environment of its own that is installed once:
its own exceptions say what it makes of a prompt that is too long, and of a model that is not there.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Figure, options
from benchmarks.serving.gateway_peers import UnavailableError, litellm_environment
from tests.compat.client_checks import CHECKS, ORIGIN, ClientSite
from tests.slow.failover.chaos_fleet import SERVICE, tiny_fleet
from tests.slow.verdict import conclude

_LITELLM = """
import sys
import litellm

litellm.suppress_debug_info = True
url, model = sys.argv[1:]
asked = {"api_base": url + "/v1", "api_key": "x", "max_retries": 0}
said = [{"role": "user", "content": "many words " * 4000}]
found = []
for name, messages in ((model, said), ("none", said[:1])):
    try:
        litellm.completion(model="openai/" + name, messages=messages, **asked)
    except Exception as error:
        found.append(type(error).__name__)
answer = litellm.completion(
    model="openai/" + model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, **asked
)
found.append(str(answer.usage.completion_tokens))
assert found == ["ContextWindowExceededError", "NotFoundError", "4"], found
"""


def litellm_exceptions(site: ClientSite) -> None:
    """LiteLLM takes a prompt that is too long for one, so that its fall-backs work."""
    python = litellm_environment() / "bin/python"
    done = subprocess.run(
        [str(python), "-c", _LITELLM, site.url, site.model],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def main() -> None:
    """Ask all checks of a fleet of this machine."""
    arguments = options(__doc__ or "")
    checks: tuple[Callable[[ClientSite], None], ...] = CHECKS
    if not arguments.quick:
        checks += (litellm_exceptions,)
    outcome = asyncio.run(_serve_and_ask(checks))
    failed, left_out = outcome.failed, outcome.left_out
    conclude(
        [
            Figure("checks", len(checks)),
            Figure("failed", len(failed), 0),
            Figure("not_run", len(left_out)),
            Figure("clients", len({check.__name__.partition("_")[0] for check in checks})),
        ],
        failures=failed,
        left_out=left_out,
    )


@dataclass
class _Outcome:
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def try_check(self, check: Callable[[ClientSite], None], site: ClientSite) -> None:
        """Run a check, and note and print what came of it."""
        name, word = check.__name__, "ok"
        try:
            check(site)
        except (ImportError, UnavailableError) as error:
            self.left_out[name], word = str(error)[:200], "not run"
        except Exception as error:  # noqa: BLE001 - whatever a client says of it
            self.failed[name], word = f"{type(error).__name__}: {error}"[:300], "FAILED"
        print(f"  {name:36s} {word}", flush=True)


async def _serve_and_ask(checks: Sequence[Callable[[ClientSite], None]]) -> _Outcome:
    outcome = _Outcome()
    async with tiny_fleet({"cors": {"origins": [ORIGIN]}}) as fleet:
        for check in checks:
            await asyncio.to_thread(outcome.try_check, check, ClientSite(fleet.url, SERVICE))
    return outcome


if __name__ == "__main__":
    main()
