"""Fleet files as YAML text: written anew, or changed so that all else stays as somebody wrote it.

`rewrite` changes as little as it can: a value where only that is another one, else the entry that holds it.
What it cannot change in place (mappings in braces, aliases) is written anew one level higher, at last the
whole file; the result always reads as the data that was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from atoll.core.files import parse_yaml

Data = Mapping[str, Any]
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./@%-]*")
_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"))
_GONE = object()
"""Value of a key that is to be removed."""


def rewrite(text: str, data: Data) -> str:
    """Return a YAML text that reads as `data`, as near as may be to `text`, which reads as a mapping."""
    before = parse_yaml(text, path="fleet.yaml").data
    if not isinstance(before, dict):
        return write_yaml(data)
    changed = _rewrite(text if text.endswith("\n") else f"{text}\n", (), before, data)
    if changed is None or parse_yaml(changed, path="fleet.yaml").data != data:
        return write_yaml(data)
    return changed


def _rewrite(text: str, path: tuple[str, ...], before: Data, after: Data) -> str | None:
    """Change the mapping at a path; None where that cannot be done in place."""
    if not after:
        return None  # an empty block mapping cannot be written
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, _GONE), after.get(key, _GONE)
        if old == new and type(old) is type(new):
            continue
        changed = None
        if isinstance(old, dict) and isinstance(new, dict):
            changed = _rewrite(text, (*path, key), old, new)
        if changed is None:
            changed = _put(text, path, key, new)
        if changed is None:
            return None
        text = changed
    return text


def _put(text: str, path: Sequence[str], key: str, value: object) -> str | None:
    """Set or remove a key of a block mapping; None where that has no lines of its own."""
    mapping = _find(text, path)
    if mapping is None or mapping.flow_style or not mapping.value:
        return None
    lines = text.splitlines(keepends=True)
    entries = [(name.value, name.start_mark, node) for name, node in mapping.value]
    column = entries[0][1].column
    if any(mark.column != column or lines[mark.line][:column].strip() for _, mark, _ in entries):
        return None
    # A block ends where the line of the next token begins.
    starts = [mark.line for _, mark, _ in entries] + [mapping.end_mark.line]
    at = next((i for i, (name, _, _) in enumerate(entries) if name == key), None)
    written = [] if value is _GONE else _indent({key: value}, column)
    if at is None:
        end = _last_line(lines, starts[-2], starts[-1])
        return "".join([*lines[:end], *written, *lines[end:]])
    if len(entries) == 1 and not written:
        return None
    node, line = entries[at][2], lines[starts[at]]
    if written and node.start_mark.line == node.end_mark.line == starts[at]:
        # On the line of its key: what is said behind it stays.
        found = line[: node.start_mark.column] + write_inline(value) + line[node.end_mark.column :]
        lines[starts[at]] = found
        return "".join(lines)
    end = _last_line(lines, starts[at], starts[at + 1])
    return "".join([*lines[: starts[at]], *written, *lines[end:]])


def _find(text: str, path: Sequence[str]) -> yaml.MappingNode | None:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in path:
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for name, value in node.value if name.value == key), None)
    return node if isinstance(node, yaml.MappingNode) else None


def _last_line(lines: Sequence[str], start: int, end: int) -> int:
    """Return the end of an entry without the blank and comment lines before the next one."""
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].lstrip()[0] == "#"):
        end -= 1
    return end


def _indent(data: Data, column: int) -> list[str]:
    written = write_yaml(data).splitlines(keepends=True)
    return [" " * column + line for line in written]


class _Dumper(yaml.SafeDumper):
    """Writes YAML that reads the same by the 1.1 and the 1.2 schema: text is quoted unless it is a name."""

    def ignore_aliases(self, data: object) -> bool:
        """Write equal values as often as they are there."""
        del data
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    bare = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if bare else '"')


_Dumper.add_representer(str, _represent_text)


def write_yaml(data: object) -> str:
    """Return plain data as the text of a YAML file."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def write_inline(value: object) -> str:
    """Return plain data as YAML on a line."""
    text = yaml.dump(
        [value],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10**9,
        default_flow_style=True,
    )
    return text.strip()[1:-1]
