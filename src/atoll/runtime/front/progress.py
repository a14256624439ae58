"""How far a stream has come, and how it goes on elsewhere when its executor is lost.

Components whose pieces hold text and the tokens it was made from take `resume` and go on from there. Others
run again from the start, and the pieces that were given already are left out. Nothing here does I/O.
"""

from __future__ import annotations

from atoll.tasks.values import Value


class StreamProgress:
    """What was given of one stream."""

    def __init__(self, inputs: dict[str, Value]) -> None:
        self._inputs = inputs
        self._tokens: list[Value] = []
        self._text = ""
        resume = inputs.get("resume")
        if isinstance(resume, dict):
            # The client's own: what it has is the beginning of what comes.
            tokens, text = resume.get("token_ids"), resume.get("text")
            self._tokens = list(tokens) if isinstance(tokens, list) else []
            self._text = text if isinstance(text, str) else ""
        self._resumable = True
        self.given = 0
        """Pieces given so far."""
        self._skip = 0

    def begin(self) -> dict[str, Value]:
        """Return the inputs with which to begin, or to go on after a loss."""
        self._skip = 0
        if self.given == 0:
            return self._inputs
        if self._resumable:
            resume: dict[str, Value] = {"token_ids": list(self._tokens), "text": self._text}
            return {**self._inputs, "resume": resume}
        self._skip = self.given
        return self._inputs

    def is_news(self, piece: Value) -> bool:
        """Take a piece; returns whether it was not given before."""
        if self._skip > 0:
            self._skip -= 1
            return False
        self.given += 1
        tokens = piece.get("token_ids") if isinstance(piece, dict) else None
        text = piece.get("text") if isinstance(piece, dict) else None
        if isinstance(tokens, list) and isinstance(text, str):
            self._tokens += tokens
            self._text += text
        else:
            self._resumable = False
        return True
