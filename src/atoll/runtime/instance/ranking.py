"""Which of several answers to a prompt are kept."""

from __future__ import annotations

from atoll.runtime.instance.answers import ChoiceDelta


def keep_best(
    answers: list[list[ChoiceDelta]], best_of: int, count: int
) -> list[list[ChoiceDelta]]:
    """Return, of every `best_of` answers in a row, the `count` whose tokens are likeliest on average."""
    if best_of <= count:
        return answers
    kept = []
    for start in range(0, len(answers), best_of):
        group = sorted(answers[start : start + best_of], key=_likelihood, reverse=True)
        kept += group[:count]
    return kept


def _likelihood(pieces: list[ChoiceDelta]) -> float:
    # A prompt that is shown first has no tokens of the answer.
    values = [entry["logprob"] for piece in pieces if piece.tokens for entry in piece.logprobs]
    return sum(values) / len(values) if values else float("-inf")
