"""The process that compiles guides on trial (`guide_trial`): one a line, as JSON, until its input ends.

For each guide it has a few seconds of CPU time. The kernel ends it when they are over.
"""

from __future__ import annotations

import json
import resource
import sys

from atoll.core.request_parameters import OutputFormat
from atoll.engine.engine_errors import EngineError
from atoll.engine.guidance import MatcherFactory, compile_guide

_CPU_S = 3
_MEMORY_BYTES = 2 * 2**30


def main(folder: str, vocabulary: int, eos: tuple[int, ...]) -> None:
    """Answer every line `[kind, text]` with what is wrong with that guide, an empty text for nothing."""
    matchers = MatcherFactory(folder, vocabulary, eos)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        try:
            # Reading the tokenizer is no fault of the guide.
            matchers.matcher(OutputFormat(kind="json_object"))
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit = int(used.ru_utime + used.ru_stime) + 1 + _CPU_S
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))
            compile_guide(matchers, OutputFormat(kind=kind, text=text))
            answer = ""
        except EngineError as error:
            answer = str(error)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), tuple(map(int, sys.argv[3:])))
