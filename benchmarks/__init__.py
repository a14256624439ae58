"""Benchmarks: `python -m benchmarks.NAME [--quick]` prints a table and ends with one line of JSON.

They lie in folders by subject; `benchmarks/README.md` says what each shows. The folders are part of this
package's path, so that NAME needs no folder on the command line. Code imports by the whole name, as in
`benchmarks.planning.templates`: by the short one a module would be loaded twice.
"""

from __future__ import annotations

from pathlib import Path

_FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("*/__init__.py"))
__path__.extend(str(folder) for folder in _FOLDERS)
