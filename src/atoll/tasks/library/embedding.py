"""The meaning of texts, as vectors."""

from __future__ import annotations

from atoll.tasks.library.shapes import EmbeddingOrder, Embeddings
from atoll.tasks.library.unit_tasks import Embed
from atoll.tasks.task import Task, settled

__all__ = ["Embedding", "EmbeddingOrder", "Embeddings"]


class Embedding(Task[EmbeddingOrder, Embeddings]):
    """Turns texts into vectors, all at once. Options: embed: its component."""

    def setup(self) -> None:
        """Name the component."""
        self.embed = Embed(self.options.get("embed", "minilm"))

    def invoke(self, request: EmbeddingOrder) -> Embeddings:
        """Embed every text of an order."""
        found = [self.embed(text=text) for text in request.texts]
        tokens = sum(settled([each["tokens"] for each in found]))
        return Embeddings([each["embedding"] for each in found], tokens)
