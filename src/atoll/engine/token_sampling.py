"""Choosing the next token from logits, at the last stage.

Randomness is a pure function of (seed, position), so the choice does not depend on what else is in
the batch, on which node makes it, or on whether the sequence was moved half-way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.errors import AtollError
from atoll.core.request_parameters import SamplingParams
from atoll.core.rng import stream
from atoll.engine.device_copy import to_device
from atoll.engine.engine_errors import EngineError
from atoll.engine.engine_messages import FINISH_CODES
from atoll.engine.guidance import Matcher, MatcherFactory

_STOP = FINISH_CODES.index("stop")
_LENGTH = FINISH_CODES.index("length")


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; `finish` is an index into FINISH_CODES; logprobs are natural, NaN if unasked."""

    token: int
    finish: int
    logprob: float = float("nan")
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of one sequence.

    `tokens` is shared with the caller, who may append tokens that were chosen elsewhere.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos: Sequence[int],
        tokens: list[int],
        prompt_length: int,
        matchers: MatcherFactory | None = None,
    ) -> None:
        self.params = params
        self.prompt_length = prompt_length
        self.tokens = tokens
        self._ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos)
        )
        self._matcher: Matcher | None = None
        if params.guide is not None:
            if matchers is None:
                raise EngineError("guided answers need tokenizer.json beside the weights")
            self._matcher = matchers.matcher(params.guide)
        # Tokens of the answer that are known already are fed to the guide before the first choice.
        self._fed = prompt_length
        self._biases: tuple[Tensor, Tensor] | None = None

    @property
    def is_simple(self) -> bool:
        """Whether logits, temperature and cuts alone decide, and nothing more is asked."""
        p = self.params
        return (
            p.logprobs is None
            and self._matcher is None
            and not p.logit_bias
            and not self._penalises
            and not self._too_short
        )

    @property
    def _penalises(self) -> bool:
        p = self.params
        return (
            p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        )

    @property
    def _too_short(self) -> bool:
        """Whether the answer may not end yet."""
        min_tokens = self.params.min_tokens
        return min_tokens > 0 and len(self.tokens) - self.prompt_length < min_tokens

    def choose(self, logits: Tensor) -> SampledToken:
        """Choose from [vocabulary] logits and take the token as the next of the sequence."""
        scores = self._adjust(logits.float())
        p = self.params
        token = int(choose_tokens(scores[None], [self], [len(self.tokens)]))
        if p.logprobs is None:
            return self.take(token)
        # Reported for the model's own distribution after penalties, before temperature and cuts.
        logs = torch.log_softmax(scores, dim=-1)
        best = torch.topk(logs, min(p.logprobs, logs.numel())) if p.logprobs else None
        top = (
            ()
            if best is None
            else tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        )
        return self.take(token, float(logs[token]), top)

    def take(
        self, token: int, logprob: float = float("nan"), top: tuple[tuple[int, float], ...] = ()
    ) -> SampledToken:
        """Append `token` and say whether the answer ends with it."""
        self.tokens.append(token)
        finish = 0
        self._catch_up()
        if token in self._ends or (self._matcher is not None and self._matcher.done):
            finish = _STOP
        elif len(self.tokens) - self.prompt_length >= self.params.max_tokens:
            finish = _LENGTH
        return SampledToken(token, finish, logprob, top)

    def _catch_up(self) -> None:
        if self._matcher is not None:
            self._matcher.feed(self.tokens[self._fed :])
            self._fed = len(self.tokens)

    def _adjust(self, scores: Tensor) -> Tensor:
        p = self.params
        self._catch_up()
        changes = self._penalises or p.logit_bias or self._matcher is not None
        if changes or self._too_short:
            # The logits are the batch's; others must not see what is changed here.
            scores = scores.clone()
        if p.repetition_penalty != 1.0:
            # Negative ones are the marks of vectors in the prompt.
            known = sorted(token for token in set(self.tokens) if token >= 0)
            used = torch.tensor(known, dtype=torch.int64, device=scores.device)
            values = scores[used]
            # A penalty above 1 makes a token less likely whatever the sign of its logit.
            scores[used] = torch.where(
                values > 0, values / p.repetition_penalty, values * p.repetition_penalty
            )
        answer = self.tokens[self.prompt_length :]
        if answer and (p.presence_penalty or p.frequency_penalty):
            tokens, counts = torch.unique(
                torch.tensor(answer, device=scores.device), return_counts=True
            )
            scores[tokens] -= p.presence_penalty + p.frequency_penalty * counts
        if p.logit_bias:
            # All at once: a thousand small steps on every token would keep the whole batch waiting.
            tokens, biases = self._bias(scores)
            scores.index_add_(0, tokens, biases)
        if self._too_short and self._matcher is None:
            ends = [token for token in self._ends if 0 <= token < scores.numel()]
            # Where every token is an end, something must still be chosen.
            if len(ends) < scores.numel():
                scores[ends] = float("-inf")
        if self._matcher is not None:
            allowed = torch.from_numpy(self._matcher.compute_allowed(scores.numel())).to(
                scores.device
            )
            scores[~allowed] = float("-inf")
        return scores

    def _bias(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self._biases is None:
            inside = [(t, b) for t, b in self.params.logit_bias if 0 <= t < scores.numel()]
            tokens = torch.tensor([t for t, _ in inside], dtype=torch.int64, device=scores.device)
            values = torch.tensor([b for _, b in inside], dtype=scores.dtype, device=scores.device)
            self._biases = tokens, values
        return self._biases


def choose_tokens(logits: Tensor, choosers: Sequence[Sampler], positions: Sequence[int]) -> Tensor:
    """Choose from [sequences, vocabulary] by temperature and cuts alone; waits for no result.

    `positions` are those of the tokens that are chosen. Returns them [sequences], where the logits are.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, chooser in enumerate(choosers) if not chooser.params.is_greedy]
    if not drawn:
        return tokens
    rows = to_device(torch.tensor(drawn), logits.device)
    scores = logits if len(drawn) == len(choosers) else logits[rows]
    params = [choosers[i].params for i in drawn]
    return tokens.index_copy(0, rows, _draw(scores, params, [positions[i] for i in drawn]))


def _draw(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Draw a token a row from softmax(logits / temperature) cut by top-k, top-p and min-p, in that order."""
    size = logits.shape[1]
    knobs = [
        (
            p.temperature,
            min(p.top_k or size, size),
            # Rounding may put the sum of all probabilities past 1: without a cut all are kept.
            p.top_p if p.top_p < 1.0 else math.inf,
            p.min_p,
            stream(p.seed or 0, "token", str(position)).random(),
        )
        for p, position in zip(params, positions, strict=True)
    ]
    # One transfer, in double precision for the last of them.
    sent = to_device(torch.tensor(knobs, dtype=torch.float64), logits.device)[:, :, None]
    temperature, top_k, top_p, min_p = sent[:, :4].float().unbind(1)
    probabilities, order = torch.sort(
        torch.softmax(logits.float() / temperature, dim=-1), descending=True, stable=True
    )
    places = torch.arange(size, device=logits.device)
    keep = (probabilities > 0) & (places < top_k)
    # The token that crosses the threshold stays.
    keep &= probabilities.cumsum(1) - probabilities < top_p
    keep &= probabilities >= min_p * probabilities[:, :1]
    # Whatever the cuts say, the likeliest stays.
    keep[:, 0] = True
    # Summed in double precision, so that small probabilities still count.
    kept = torch.where(keep, probabilities, 0.0).double().cumsum(1)
    index = torch.searchsorted(kept, sent[:, 4] * kept[:, -1:], right=True)
    # Rounding may put the point past the last token that is kept.
    last = torch.where(keep, places, 0).amax(1, keepdim=True)
    return order.gather(1, torch.minimum(index, last))[:, 0]


def choose_batch(logits: Tensor, choosers: Sequence[Sampler]) -> list[SampledToken | AtollError]:
    """Choose for several sequences from [sequences, vocabulary]; the simple ones in one go.

    A sequence that cannot go on (its guide allows nothing more) gets its error and no choice.
    """
    simple = [i for i, chooser in enumerate(choosers) if chooser.is_simple]
    tokens: dict[int, int] = {}
    if simple:
        scores = logits
        if len(simple) < len(choosers):
            scores = logits[to_device(torch.tensor(simple), logits.device)]
        those = [choosers[i] for i in simple]
        found = choose_tokens(scores, those, [len(chooser.tokens) for chooser in those])
        tokens = dict(zip(simple, found.tolist(), strict=True))
    choices: list[SampledToken | AtollError] = []
    for i, chooser in enumerate(choosers):
        try:
            token = tokens.get(i)
            choices.append(chooser.choose(logits[i]) if token is None else chooser.take(token))
        except AtollError as error:
            choices.append(error)
        except Exception as error:  # noqa: BLE001 - one sequence's choice must not end the node
            choices.append(EngineError(f"no token can be chosen: {type(error).__name__}: {error}"))
    return choices
