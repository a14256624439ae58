"""The example fleets and plans that come with Atoll: where they are, and what each shows."""

from __future__ import annotations

from pathlib import Path

from atoll.core.errors import UnknownNameError

_PACKAGE = Path(__file__).resolve().parents[2]
# An installed package carries them inside; a checkout has them beside its sources.
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")
_ENDINGS = (".yaml", ".json")


def list_examples() -> dict[str, Path]:
    """Return the files by name without ending, in the order of their names; empty if none came along."""
    folder = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    if folder is None:
        return {}
    return {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in _ENDINGS}


def find_example(name: str) -> Path:
    """Return the path of the example called `name`, such as "quickstart"."""
    examples = list_examples()
    if name not in examples:
        raise UnknownNameError("example", name, list(examples))
    return examples[name]


def describe_example(path: Path) -> str:
    """Return the first sentence of a fleet file's opening comment; plans have none and share a line."""
    if path.suffix == ".json":
        return "A plan, ready to serve."
    comment: list[str] = []
    for line in path.read_text("utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    sentence, _, _ = " ".join(comment).partition(". ")
    return sentence.removesuffix(".") + "."
