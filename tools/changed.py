"""Which tests can see what changed, by who imports whom; `make test-changed` runs them.

    python -m tools.changed [REVISION]

prints the files of tests that import a changed module, the nearest first; imports inside functions count.
The tests in `tests/cli` are taken with a changed command, which its name in a table leads to. What else only
a name in a string leads to is left to `make test`.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.structure import ROOT, Imports, Names, list_names, resolve_names

FOLDERS = ("src/atoll", "tests", "tools", "benchmarks", "research")
CACHE = ROOT / ".cache" / "imports.json"
# Where these change, nothing is sure to be untouched.
EVERYTHING = frozenset({"pyproject.toml", "tests/conftest.py", "tests/seeds.py"})


def list_changed(revision: str) -> set[str]:
    """Return the files that differ from a revision, those included that git does not know yet."""
    changed: set[str] = set()
    for command in (
        ("diff", "--name-only", "--no-renames", revision),
        ("ls-files", "--others", "--exclude-standard"),
    ):
        listed = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if listed.returncode:
            raise SystemExit(f"error: git {command[0]}: {listed.stderr.strip()}")
        changed |= set(listed.stdout.splitlines())
    return changed


def name_module(file: str) -> str:
    """Return the dotted name of a file, `atoll.core.ids` of `src/atoll/core/ids.py`."""
    parts = Path(file).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(root: Path = ROOT, cache: Path = CACHE) -> dict[str, Names]:
    """Return what each file imports, by its path; files that did not change are not parsed again."""
    try:
        kept = json.loads(cache.read_text("utf-8"))
    except (OSError, ValueError):
        kept = {}
    stamps: dict[str, list[int]] = {}
    found: dict[str, Names] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            file, status = str(path.relative_to(root)), path.stat()
            stamps[file] = [status.st_size, status.st_mtime_ns]
            stamp, names = kept.get(file, (None, []))
            if stamp == stamps[file]:
                found[file] = [(package, name) for package, name in names]
            else:
                found[file] = list_names(ast.parse(path.read_text("utf-8")))
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps({file: (stamps[file], found[file]) for file in found}), "utf-8")
    return found


def is_test(file: str) -> bool:
    """Whether pytest collects a file."""
    return file.startswith("tests/") and Path(file).name.startswith("test_")


def find_starts(changed: Iterable[str], files: Iterable[str], root: Path = ROOT) -> set[str]:
    """Return the files of Python that a change begins with.

    Data of a package stand for the modules beside it, a `conftest.py` for the tests below it, a page or an
    example for the tests that name it, and a command for the tests of commands.
    """
    files = list(files)
    starts: set[str] = set()
    for file in changed:
        path = Path(file)
        if path.name == "conftest.py":
            starts |= {each for each in files if Path(each).is_relative_to(path.parent)}
        elif path.suffix == ".py":
            starts.add(file)
            if file.startswith("src/atoll/cli/"):
                starts |= {each for each in files if each.startswith("tests/cli/")}
        elif file.startswith("src/"):
            package = next(up for up in path.parents if (root / up / "__init__.py").exists())
            starts |= {each for each in files if Path(each).parent == package}
        else:
            words = (path.name, f'"{path.parts[0]}"', f'"{path.parts[0]}/')
            starts |= {
                each
                for each in files
                if is_test(each) and any(w in (root / each).read_text("utf-8") for w in words)
            }
    return starts


def order_by_distance(starts: Iterable[str], imports: Imports) -> list[str]:
    """Return the modules that import any of `starts`, directly or not, the nearest first."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        for each in imported:
            importers[each].add(module)
    seen = dict.fromkeys(sorted(starts))
    waiting = deque(seen)
    while waiting:
        for module in sorted(importers[waiting.popleft()]):
            if module not in seen:
                seen[module] = None
                waiting.append(module)
    return list(seen)


def select_tests(changed: set[str], names: Mapping[str, Names], root: Path = ROOT) -> list[str]:
    """Return the files of tests that can see a change, the nearest first."""
    if changed & EVERYTHING:
        return [file for file in names if is_test(file)]
    modules = {name_module(file): file for file in names}
    imports = resolve_names({module: names[file] for module, file in modules.items()})
    starts = [name_module(file) for file in find_starts(changed, names, root)]
    near = order_by_distance(starts, imports)
    return [modules[module] for module in near if is_test(modules.get(module, ""))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("revision", nargs="?", default="HEAD", help="since when (default HEAD)")
    for file in select_tests(list_changed(parser.parse_args().revision), read_imports()):
        print(file)


if __name__ == "__main__":
    main()
