"""POST /v1/embeddings: texts in, vectors out."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from atoll.core.request_parameters import Name, Positive
from atoll.runtime.graph_server.graph_request import GraphRequest
from atoll.runtime.graph_server.request_fields import read_fields
from atoll.runtime.http.handlers import Answer, Response
from atoll.runtime.http.http_server import Request
from atoll.runtime.openai import ApiError
from atoll.tasks.library.shapes import EmbeddingOrder, Embeddings


class EmbeddingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request; tokens instead of texts are not taken, since tokenizers differ."""

    model: Name
    input: str | Annotated[list[str], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    models: Any = None
    user: Any = None

    @property
    def texts(self) -> list[str]:
        """Texts to embed."""
        return [self.input] if isinstance(self.input, str) else self.input


def read_embedding(request: Request) -> EmbeddingFields:
    """Read a request; what is wrong with it is an ApiError."""
    fields = read_fields(EmbeddingFields, request.body)
    for number, text in enumerate(fields.texts):
        if not text:
            param = "input" if isinstance(fields.input, str) else f"input[{number}]"
            raise ApiError(400, f"{param}: empty", param=param)
    return fields


async def answer_embedding(fields: EmbeddingFields, request: GraphRequest) -> Answer:
    """Let the task embed."""
    most = request.limits.inputs
    if len(fields.texts) > most:
        raise ApiError(400, f"input: at most {most} texts are taken", param="input")
    request.begin(EmbeddingOrder(fields.texts), wants=("text",))
    found: Embeddings = await request.result()
    data: list[dict[str, Any]] = []
    for number, handle in enumerate(found.vectors):
        vector = (await request.array(handle)).astype("<f4")
        if fields.dimensions not in (None, len(vector)):
            message = f"dimensions: vectors here have {len(vector)}; leave it out"
            raise ApiError(400, message, param="dimensions")
        encoded: Any = vector.tolist()
        if fields.encoding_format == "base64":
            encoded = base64.b64encode(vector.tobytes()).decode()
        data.append({"object": "embedding", "index": number, "embedding": encoded})
    request.usage.prompt_tokens = found.tokens
    answer: dict[str, Any] = {
        "object": "list",
        "model": fields.model,
        "data": data,
        "usage": {"prompt_tokens": found.tokens, "total_tokens": found.tokens},
    }
    answer |= request.extras(await request.more(found))
    return Response(msgspec.json.encode(answer), headers=request.headers())
