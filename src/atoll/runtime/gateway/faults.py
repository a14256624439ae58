"""Errors for clients whom no backend could answer."""

from __future__ import annotations

from atoll.runtime.openai import ApiError

_ENDING_RETRY_S = 30
"""After which another node may have come for those that end."""
_MAX_RETRY_S = 3600
"""Longest wait that a client is told, whatever a backend says."""


def busy(model: str) -> ApiError:
    """Every backend is full or down."""
    return server_fault(503, f"all backends of {model} are busy or down", "overloaded", 1)


def unknown_model(name: str) -> ApiError:
    """No backend serves this model."""
    return ApiError(
        404,
        f"The model {name!r} does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def gone(model: str) -> ApiError:
    """The model was served a moment ago, and may be again."""
    return server_fault(503, f"no node serves {model} now", "model_unavailable", 5)


def forbidden(model: str, reasons: str) -> ApiError:
    """The policy of the key is against every node there is."""
    return ApiError(
        403,
        f"your key may use none of the nodes that serve {model}: {reasons}",
        kind="permission_error",
        code="policy_forbids",
    )


def not_allowed(model: str, reasons: str, *, trusted: bool) -> ApiError:
    """No node meets the policy of the request."""
    who = "no node of a trusted provider serves" if trusted else "no node that may be used serves"
    return server_fault(503, f"{who} {model} now: {reasons}", "policy_unmet", 5)


def ending(model: str, reasons: str) -> ApiError:
    """Nobody lives long enough to answer; others may come."""
    text = f"no node that serves {model} lives long enough for this request: {reasons}"
    return server_fault(503, text, "nodes_ending", _ENDING_RETRY_S)


def unreachable(model: str) -> ApiError:
    """No backend could be connected to."""
    return server_fault(503, f"no backend of {model} can be reached", "overloaded", 1)


def attempt_failed(reason: str, *, late: bool) -> ApiError:
    """The last attempt failed, or ran into its deadline."""
    return server_fault(504 if late else 502, f"no backend answered: {reason}", "upstream_error")


def stream_interrupted(reason: str) -> ApiError:
    """A stream broke off and cannot go on."""
    return server_fault(502, f"the stream broke off: {reason}", "stream_interrupted")


def stream_gone() -> ApiError:
    """A stream that another gateway began is not known here."""
    return ApiError(410, "this stream cannot be taken up any more", code="stream_gone")


def not_apart(what: str) -> ApiError:
    """Backends that decode only cannot do what is asked."""
    return ApiError(
        400,
        f"{what} is not served where prompts and answers are computed by different backends",
        code="unsupported_parameter",
    )


def private_field(name: str) -> ApiError:
    """A request brings what only a gateway may set."""
    return ApiError(400, f"{name} is not for clients to set", param=name, code="invalid_field")


def in_stream(error: ApiError) -> ApiError:
    """Return what the last event of a stream says that had begun and cannot go on."""
    if error.status < 500 or error.code in ("stream_interrupted", "timeout"):
        return error
    return stream_interrupted(error.message)


def poison() -> ApiError:
    """Backends died of the request."""
    return ApiError(
        422,
        "backends stopped working while they read this request; it is not sent to any more of them",
        code="poison_request",
    )


def too_long() -> ApiError:
    """The time for all attempts together is up."""
    return server_fault(504, "the request took too long", "timeout")


def backend_refused(status: int, retry_after: bytes, said: str = "") -> ApiError:
    """A backend answered with a status that is worth another attempt, and none was left."""
    message = f"the backend answered with status {status}" + (f": {said}" if said else "")
    retry_s = min(int(retry_after[:9]), _MAX_RETRY_S) if retry_after.isdigit() else 1
    if status == 429:
        return ApiError(
            429, message, kind="rate_limit_error", code="overloaded", retry_after_s=retry_s
        )
    if status == 503:
        return server_fault(
            503, message, "overloaded" if retry_after else "upstream_error", retry_s
        )
    return server_fault(502, message, "upstream_error")


def server_fault(
    status: int, message: str, code: str = "overloaded", retry_s: int | None = None
) -> ApiError:
    """Return an error that is not the client's, who may ask again after `retry_s` seconds."""
    return ApiError(status, message, kind="server_error", code=code, retry_after_s=retry_s)
