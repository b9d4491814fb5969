"""What goes wrong with a call, as clients are told: an HTTP status and OpenAI's error object."""

from typing import Any

from tlt.errors import TltError

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(TltError):
    """Answered with this status. `param` is the field at fault; `code` a word for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, message: str) -> ApiError:
    """A field whose value cannot be taken."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
