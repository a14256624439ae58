"""Command that a node of an instance runs: arguments, environment, files of secrets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """Command of one node of an instance.

    `env` is for everyone to see. `secrets` are files by the environment variable that names them; what is in
    them goes by file or the target's own secrets, never into a command line, a log or `env`. `gpus` are taken
    of the node, `{port}` in `argv` is a free port there. A node without `argv` is for what the first node's
    command starts there.
    """

    node: str
    node_type: str
    argv: tuple[str, ...]
    gpus: int
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = ()
