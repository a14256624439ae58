"""The table of features by engine in the reference of the gateway, from what a run of the probes has noted.

python -m tests.real.table    writes it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTED = Path(__file__).with_name("features.json")
PAGE = ROOT / "docs" / "reference" / "gateway.md"
BEGIN, END = "<!-- features: begin -->", "<!-- features: end -->"
TITLES = {"atoll": "Atoll", "vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang"}


def read_noted() -> dict[str, Any]:
    """Return what the last run has noted."""
    noted: dict[str, Any] = json.loads(NOTED.read_text("utf-8"))
    return noted


def draw_table(noted: Mapping[str, Any]) -> str:
    """Return the table in Markdown, with the reasons of refusals below it."""
    engines = [name for name in TITLES if name in noted["engines"]]
    lines = [
        "| | " + " | ".join(_title(name, noted["engines"][name]) for name in engines) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    reasons: list[str] = []
    for feature, cells in noted["features"].items():
        shown = [_cell(cells.get(name), reasons) for name in engines]
        lines.append(f"| {feature} | {' | '.join(shown)} |")
    lines.append("")
    lines += [f"{number}. {why}" for number, why in enumerate(reasons, 1)]
    for name in engines:
        missing = noted["engines"][name].get("not_run")
        if missing:
            lines.append(f"\n{TITLES[name]} was not run: {missing}.")
    return "\n".join(lines).rstrip() + "\n"


def _title(name: str, engine: Mapping[str, str]) -> str:
    return " ".join([TITLES[name], engine.get("version", "")]).strip()


def _cell(cell: Mapping[str, str] | None, reasons: list[str]) -> str:
    if cell is None:
        return "not run"
    why = cell.get("why")
    if why is None:
        return cell["word"]
    if why not in reasons:
        reasons.append(why)
    return f"{cell['word']} ({reasons.index(why) + 1})"


def put_table(page: str, table: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}{END}{after}"


def main() -> int:
    """Write the table."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(put_table(page, draw_table(read_noted())), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
