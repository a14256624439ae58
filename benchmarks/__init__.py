"""Benchmarks: `python -m benchmarks.NAME [--quick]` prints a table and ends with one line of JSON.

They lie in folders by subject; `benchmarks/README.md` says what each shows. Those that assert rather than
measure are tests and lie in the folders of `tests/slow`. All these folders are part of this package's path,
so that NAME needs no folder on the command line. Code imports by the whole name, as in
`benchmarks.planning.templates`: by the short one a module would be loaded twice.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
_FOLDERS = [path.parent for path in _HERE.glob("*/__init__.py")]
_FOLDERS += [
    path for path in (_HERE.parent / "tests" / "slow").glob("*/") if path.name[0].isalpha()
]
__path__.extend(str(folder) for folder in sorted(_FOLDERS))
