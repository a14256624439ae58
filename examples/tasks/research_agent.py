"""An agent in plain Python: it reads pages, asks until it knows enough, and answers.

    python examples/tasks/research_agent.py

It runs here on components that are a few lines each, so that it needs no models; on a fleet, a service names
the same class as "research_agent:ResearchAgent", and its units run on executors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from atoll.tasks.invocation import Final, Invocation
from atoll.tasks.library.unit_tasks import Chat, Embed, ReadText
from atoll.tasks.run import Run
from atoll.tasks.task import Task, settled
from atoll.tasks.values import Value


@dataclass(frozen=True)
class Question:
    """A question about scanned pages; `pages` are pictures."""

    text: str
    pages: list[Any]
    max_steps: int = 3


@dataclass(frozen=True)
class Finding:
    """The answer, a stream, and the pages it is from, best first."""

    answer: str
    pages: list[int]
    steps: int


class ResearchAgent(Task[Question, Finding]):
    """Reads all pages at once, picks those that fit the question, and thinks until it says it is done."""

    def setup(self) -> None:
        """Name the components."""
        self.read = ReadText(self.options.get("read", "pp-ocr"))
        self.embed = Embed(self.options.get("embed", "minilm"))
        self.think = Chat(self.options.get("think", "smollm2"))

    def invoke(self, request: Question) -> Finding:
        """Answer a question."""
        # All pages are read at once; nothing is looked at, so this does not end the round.
        texts = [self.read(image=page)["text"] for page in request.pages]
        vectors = [self.embed(text=text)["embedding"] for text in texts]
        wanted = self.embed(text=request.text)["embedding"]
        # `settled` looks at all of them: one round, however many pages there are.
        target, *found = settled([wanted, *vectors])
        ranked = sorted(range(len(found)), key=lambda page: -closeness(target, found[page]))
        notes = [{"role": "user", "content": texts[page]} for page in ranked[:2]]
        # Loops on results are plain loops: each `in` looks at a thought, and ends a round.
        for step in range(request.max_steps):
            thought = self.think(messages=[*notes, {"role": "user", "content": request.text}])
            if "not sure" not in thought:
                return Finding(thought, ranked[:2], step + 1)
            notes.append({"role": "assistant", "content": thought})
        last = self.think(
            messages=[*notes, {"role": "user", "content": "Answer as well as you can."}]
        )
        return Finding(last, ranked[:2], request.max_steps + 1)


def closeness(one: list[float], other: list[float]) -> float:
    """Return the scalar product of two vectors."""
    return sum(a * b for a, b in zip(one, other, strict=True))


class ToyComponents:
    """Stands in for a fleet: reads pages that are texts already, and needs two thoughts."""

    async def call(self, invocation: Invocation) -> Value:
        """Read a page, or count a few words in a text."""
        if invocation.component == "pp-ocr":
            return {"text": invocation.inputs["image"], "lines": []}
        text = str(invocation.inputs["text"]).lower()
        words = ("bridge", "bread", "rain", "built")
        return {"embedding": [float(text.count(word)) for word in words], "tokens": len(words)}

    async def stream(self, invocation: Invocation) -> AsyncIterator[Value | Final]:
        """Think: the first thought is not sure."""
        messages = invocation.inputs["messages"]
        assert isinstance(messages, list)
        text = "I am not sure yet." if len(messages) < 4 else "The bridge was built in 1894."
        for word in text.split(" "):
            yield {"text": word + " ", "token_ids": []}
        yield Final({"text": text})


async def main() -> None:
    """Ask the agent, and say what it did."""
    question = Question(
        "When was the bridge built?", ["The bridge: 1894.", "Rain today.", "Bread."]
    )
    run = Run(ResearchAgent(), question, ToyComponents(), double_check=True)
    found = await run.result()
    print(f"{found.answer.strip()} (pages {found.pages}, {found.steps} thoughts)")
    print(f"{len(run.records)} invocations in {run.rounds} rounds")


if __name__ == "__main__":
    asyncio.run(main())
