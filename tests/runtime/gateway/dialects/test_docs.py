"""The reference names every field of every dialect."""

from __future__ import annotations

import re
from pathlib import Path

from atoll.runtime.gateway.dialects import DIALECTS

PAGE = (Path(__file__).resolve().parents[4] / "docs/reference/gateway.md").read_text("utf-8")
COMMON = {"model", "stream"}
OLD = {"output_format"}
"""An earlier name of `output_config.format`."""


def test_every_field_is_named() -> None:
    section = PAGE[PAGE.index("## Dialects") : PAGE.index("## Pictures, sound, video")]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    section = PAGE[PAGE.index("### Parameters") : PAGE.index("## Dialects")]
    parameters = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    responses, messages, count = DIALECTS.values()
    # What is counted is what would be asked.
    assert set(count.request.__struct_fields__) <= set(messages.request.__struct_fields__)
    for column, dialect in ((2, responses), (3, messages)):
        said = "".join(row[column] for row in rows)
        said += "".join(row[column + 2] for row in parameters)
        names = set(re.findall(r"`(\w+\*?)", said))
        starred = tuple(name[:-1] for name in names if name.endswith("*"))
        missing = {
            field
            for field in dialect.request.__struct_fields__
            if field not in names and not (starred and field.startswith(starred))
        }
        assert missing <= COMMON | OLD
