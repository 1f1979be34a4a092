"""Errors in the form of OpenAI's API: {"error": {message, type, param, code}}."""

import contextlib
from collections.abc import Iterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from diagd.web.guard import JSONError

CODES = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "request_too_large"}


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}

    @property
    def document(self) -> dict[str, dict[str, str | None]]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}

    def response(self) -> JSONResponse:
        return JSONResponse(self.document, self.status, self.headers)


@contextlib.contextmanager
def refusing(param: str | None) -> Iterator[None]:
    """Turn a ValueError into status 400, naming the parameter at fault."""
    try:
        yield
    except ValueError as error:
        place = error.place if isinstance(error, JSONError) else param
        raise ApiError(400, str(error), place, "invalid_value") from None


def handle_errors(app: FastAPI) -> None:
    """Make an app answer errors in this form."""
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(Exception, _answer)  # raised again by Starlette, for the log


def _answer(_: Request, error: Exception) -> JSONResponse:
    told = ApiError(500, "the server failed")
    if isinstance(error, ApiError):
        told = error
    elif isinstance(error, HTTPException):
        code = CODES.get(error.status_code)
        told = ApiError(error.status_code, str(error.detail), None, code)
        told.headers |= error.headers or {}
    return told.response()
