"""Reading and writing files: whole or not at all, limited in size, errors with path and line.

YAML is read by the 1.2 core schema rather than PyYAML's 1.1: `no` and `on` are strings, `1e9` is a
number, `12:30` is not 750, dates stay text, and a key given twice is an error.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from atoll.core.errors import InputError, UsageError, shorten

# Limits against files that would fill the memory (size, aliases) or the C stack (depth).
MAX_TEXT_BYTES = 16 * 2**20
_MAX_YAML_NODES = 2_000_000
_MAX_YAML_DEPTH = 100


def atomic_write(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replace the file's content in one step; a reader sees the old content or the new, never half.

    Text is written as UTF-8 with its newlines untouched. Permissions of an existing file are kept,
    and a symbolic link keeps pointing at the file it names. The folder must exist. What cannot be
    written is an InputError that names the path and a fix.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        # The file a link names is replaced: replacing the link itself would cut it off from that file.
        _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise InputError(
            f"cannot write: {reason.lower()}",
            path=path,
            hint=_WRITE_FIXES.get(error.errno or 0, "write it somewhere else"),
        ) from error


_WRITE_FIXES = {
    errno.ENOENT: "create the folder first, or name another",
    errno.ENOTDIR: "create the folder first, or name another",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "name a folder you may write to",
    errno.EPERM: "name a folder you may write to",
    errno.EROFS: "name a folder you may write to",
    errno.ENOSPC: "free some space, or write it somewhere else",
    errno.EDQUOT: "free some space, or write it somewhere else",
    errno.ENAMETOOLONG: "use a shorter name",
}


def _replace(target: Path, content: bytes) -> None:
    # In the same folder: a rename is one step only within a file system.
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            # The content is on the disk before the name leads to it, in case the machine stops in between.
            os.fsync(stream.fileno())
        # `mkstemp` lets only the owner read.
        os.chmod(temporary, _mode_for(target))
        os.replace(temporary, target)
    except BaseException:
        # Also on Ctrl-C: no temporary file stays behind.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _mode_for(target: Path) -> int:
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        # The umask can only be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def unreadable(error: OSError, path: str | os.PathLike[str]) -> InputError:
    """Return what to tell a person whose file cannot be read."""
    reason = (error.strerror or str(error) or type(error).__name__).split("(")[0].strip().lower()
    hint = _READ_FIXES.get(error.errno or 0, "check that it can be read")
    return InputError(f"cannot read the file: {reason}", path=path, hint=hint)


_READ_FIXES = {
    errno.ENOENT: "check the name and the folder",
    errno.ENOTDIR: "check the name and the folder",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "have its owner let you read it",
    errno.EPERM: "have its owner let you read it",
    errno.ENAMETOOLONG: "use a shorter name",
}


def read_text_limited(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 text file of at most `max_bytes` bytes; anything else is an InputError."""
    try:
        with open(path, "rb") as stream:
            # One byte more than allowed tells that a file is too large, without reading all of it.
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise unreadable(error, path) from error
    if len(content) > max_bytes:
        raise InputError(
            f"the file is larger than {max_bytes} bytes",
            path=path,
            hint="check that it is the right one",
        )
    try:
        # A byte order mark at the start is not part of the text.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            "the file is not UTF-8 text", path=path, line=line, hint="save it as UTF-8"
        ) from error


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The plain data of a YAML file, and on which line every value stands."""

    path: str
    data: object
    lines: Mapping[tuple[str, ...], int]

    def line(self, *location: str | int) -> int | None:
        """Return the line of the value at `location` (keys, list indices), or of what holds it."""
        keys = tuple(str(part) for part in location)
        for end in range(len(keys), -1, -1):
            if keys[:end] in self.lines:
                return self.lines[keys[:end]]
        return None


def load_yaml(path: str | os.PathLike[str], *, max_bytes: int = MAX_TEXT_BYTES) -> object:
    """Read a YAML file into dicts, lists and scalars; any problem is an InputError with its line.

    An empty file gives None. Only plain data is built, never objects named by the file.
    """
    return load_yaml_file(path, max_bytes=max_bytes).data


def load_yaml_file(path: str | os.PathLike[str], *, max_bytes: int = MAX_TEXT_BYTES) -> YamlFile:
    """Read a YAML file as `load_yaml` does and keep the line of every value for later errors."""
    return parse_yaml(read_text_limited(path, max_bytes), path=path)


def parse_yaml(text: str, *, path: str | os.PathLike[str]) -> YamlFile:
    """Read YAML text that came from `path`; see `load_yaml` for what is accepted."""
    try:
        _check_depth(text, path)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return YamlFile(os.fspath(path), None, {})
            _check_size(root, path)
            return YamlFile(os.fspath(path), loader.construct_document(root), _lines(root))
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        raise InputError(
            f"not valid YAML: {error.problem or error.context}",
            path=path,
            line=line,
            hint=_yaml_fix(error.problem or ""),
        ) from error
    except yaml.YAMLError as error:
        hint = "check the indentation, brackets and quotes"
        raise InputError(f"not valid YAML: {error}", path=path, hint=hint) from error


def _yaml_fix(problem: str) -> str:
    if "given twice" in problem:
        return "keep one of them"
    if "cannot start any token" in problem:
        return "indent with spaces, not tabs, and put text with special characters in quotes"
    return "check the indentation, brackets and quotes there and in the line before"


def _check_depth(text: str, path: str | os.PathLike[str]) -> None:
    """Refuse deep nesting before composing, which recurses in C and would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MAX_YAML_DEPTH:
                raise InputError("the YAML is nested too deeply", path=path, hint="flatten it")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Safe loader that refuses duplicate keys; resolvers and constructors are set below."""

    # Own tables, so that changing them leaves PyYAML's loaders alone.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: Node, deep: bool = False) -> dict[Hashable, object]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value if isinstance(node, MappingNode) else ():
            if key_node.tag == "tag:yaml.org,2002:merge":
                # It is no key of the mapping itself.
                continue
            key = self.construct_object(key_node, deep=True)
            # PyYAML itself refuses keys that cannot be hashed, below.
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        mapping: dict[Hashable, object] = super().construct_mapping(node, deep=deep)
        return mapping


def _construct_int(loader: _Loader, node: ScalarNode) -> int:
    text = loader.construct_scalar(node)
    # In YAML 1.2 only 0x and 0o name a base: 0123 is 123.
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)
for _kind, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _children(node: Node) -> list[Node]:
    if isinstance(node, MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, SequenceNode) else []


def _check_size(root: Node, path: str | os.PathLike[str]) -> None:
    """Refuse aliases that repeat each other into billions of values, or contain themselves."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: Node) -> int:
        key = id(node)
        # Every node is counted once, however many aliases lead to it.
        if key in sizes:
            return sizes[key]
        line = node.start_mark.line + 1
        if key in open_nodes:
            raise InputError(
                "an alias refers to the value that holds it",
                path=path,
                line=line,
                hint="write the value out",
            )
        open_nodes.add(key)
        total = 1 + sum(size(child) for child in _children(node))
        open_nodes.discard(key)
        if total > _MAX_YAML_NODES:
            raise InputError(
                "the aliases expand to too many values",
                path=path,
                line=line,
                hint="write fewer of them",
            )
        sizes[key] = total
        return total

    size(root)


def _lines(root: Node) -> dict[tuple[str, ...], int]:
    lines: dict[tuple[str, ...], int] = {}

    def visit(node: Node, location: tuple[str, ...]) -> None:
        if isinstance(node, MappingNode):
            for key, value in node.value:
                here = (*location, str(key.value))
                # The key's line is where a reader looks, even if the value starts further down.
                lines[here] = key.start_mark.line + 1
                visit(value, here)
        elif isinstance(node, SequenceNode):
            for index, value in enumerate(node.value):
                here = (*location, str(index))
                lines[here] = value.start_mark.line + 1
                visit(value, here)

    lines[()] = root.start_mark.line + 1
    visit(root, ())
    return lines


def read_json_object(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read a JSON file that holds an object; anything else is an InputError."""
    try:
        data = json.loads(read_text_limited(path))
    except json.JSONDecodeError as error:
        raise InputError(
            f"not JSON: {error.msg}", path=path, line=error.lineno, hint="write it anew as JSON"
        ) from error
    if not isinstance(data, dict):
        raise InputError("not a JSON object", path=path, hint="it should begin with {")
    return data


def check_target(path: Path, endings: tuple[str, ...] = ()) -> None:
    """Raise where no file could be written at `path`, or it has none of `endings`; writes nothing.

    A disk may still fill up later; what a person can mistype is found here, before minutes are spent on
    what goes into the file.
    """
    if endings and path.suffix.lower() not in endings:
        raise UsageError(
            f"cannot write {shorten(path.name)}", hint=f"name a {' or '.join(endings)} file"
        )
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        is_folder = False
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"cannot write: {reason}", path=path, hint="name another file") from error
    if is_folder:
        hint = "name a file, not a folder"
        raise InputError("cannot write: is a directory", path=path, hint=hint)
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):  # Path.is_dir() raises where the name is too long
        raise InputError("no such folder", path=path.parent, hint="create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        hint = "name a folder you may write to"
        raise InputError("cannot write: permission denied", path=path, hint=hint)
