"""A process that serves requests as a gateway would, until it is killed.

    python -m tests.runtime.accounts.crashing DB JOURNAL TRUTH KEY

Every delivery is first written to the file TRUTH (request, tokens so far), so that the tokens a client
has received are known however the process ends: those of the ledger must be the same, or the one
delivery more or less at which it died.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from atoll.runtime.accounts.accounts import Accounts
from atoll.runtime.openai import Usage
from atoll.telemetry.usage_record import Attempt
from tests.runtime.accounts.helpers import record


async def main(url: str, journal: str, truth: str, key: str) -> None:
    accounts = await Accounts.open(url, journal=Path(journal), refresh_s=0.02)
    out = os.open(truth, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    header = f"Bearer {key}".encode()
    number = 0

    async def client(name: int) -> None:
        nonlocal number
        chance = random.Random(name)
        while True:
            number += 1
            request = f"{os.getpid()}-{number}"
            grant = accounts.admit(header, "m")
            slot = accounts.opened(grant, request, "m", "/v1/completions")
            tokens = 0
            for _ in range(chance.randrange(1, 30)):
                tokens += chance.randrange(1, 4)
                os.write(out, f"{request} {tokens}\n".encode())
                accounts.delivered(slot, tokens)
                # 10 ms of speech and 3 pixels a token.
                accounts.used_media(
                    slot, Usage(speech_seconds=tokens / 100, image_pixels=3 * tokens)
                )
                await asyncio.sleep(0)
            attempts = (Attempt("a", tokens=tokens // 2), Attempt("b", tokens=tokens - tokens // 2))
            done = record(request, prompt=7, completion=tokens, attempts=attempts)
            accounts.closed(
                slot, grant, done._replace(speech_seconds=tokens / 100, image_pixels=3 * tokens)
            )
            await asyncio.sleep(0.001 * chance.random())

    await asyncio.gather(*(client(name) for name in range(12)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
