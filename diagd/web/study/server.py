"""The web app of the study: raters enrol, fetch pairs, answer; the owner reads the results.

A rater is known by a secret in a cookie, never by name: who gives a name that another rater has is
somebody else, and gets a number behind it. Nothing that leaves here says which system made a video:
ids are random, clips carry no metadata and names stay here. Results, which do say it, need the key
that was printed when the server started.
"""

import hashlib
import secrets
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from av.error import FFmpegError
from fastapi import Cookie, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diagd.web.guard import (
    SECONDS_TO_ASK,
    PatientProtocol,
    adding_headers,
    check_origin,
    page_rules,
    read_body,
)
from diagd.web.study.options import LOOPBACK
from diagd.web.study.pairs import QUESTIONS, StudyPairs, playable
from diagd.web.study.results import results_page
from diagd.web.study.store import StudyStore

STATIC = Path(__file__).with_name("static")
PAGES = {"/": "study.html", "/study.js": "study.js", "/study.css": "study.css"}
MAX_NAME = 40
MAX_HEADER_BYTES = 16384
MAX_BODY_BYTES = 4096
SECONDS_REMEMBERED = 365 * 24 * 3600
_RULES = page_rules(images="data:", media="blob:")


def study_server(
    pairs: StudyPairs, store: StudyStore, seed: int, port: int, names: Collection[str]
) -> uvicorn.Server:
    """Build the server for a port, reached under the loopback names and these."""
    bracketed = (f"[{name}]" if ":" in name else name for name in (*LOOPBACK, *names))
    # browsers leave out :80 and :443, the latter also of a proxy before this port
    hosts = {host for name in bracketed for host in (name.lower(), f"{name.lower()}:{port}")}
    config = uvicorn.Config(
        RequestGuard(study_app(pairs, store, seed), hosts),
        http=PatientProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="warning",
        server_header=False,
    )
    return uvicorn.Server(config)


class Enrolment(BaseModel):  # of a rater, anonymous without a name
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(max_length=MAX_NAME)


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    trial: int = Field(ge=0, le=10**6)
    question: str = Field(max_length=40)
    choice: str = Field(max_length=10)


def study_app(pairs: StudyPairs, store: StudyStore, seed: int) -> FastAPI:
    """Build the application: pages, and a small JSON interface for them."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    clips = {clip.name: clip for clip in pairs.clips}
    # cookies know no ports: another study on this machine must not take this one's away
    cookie = f"rater-{hashlib.sha256(store.results_key.encode()).hexdigest()[:12]}"
    secret_cookie = Cookie(alias=cookie, max_length=64)

    @app.get("/")
    @app.get("/study.js")
    @app.get("/study.css")
    def page(request: Request) -> FileResponse:
        return FileResponse(STATIC / PAGES[request.url.path])

    @app.post("/api/raters")
    def enrol(enrolment: Enrolment, response: Response) -> dict[str, str]:
        name = " ".join(enrolment.name.split())
        if not name.isprintable():
            raise HTTPException(422, "a name is made of letters, digits and signs")
        try:
            secret, known_as = store.enrol(name, seed)
        except ValueError as error:
            raise HTTPException(409, str(error)) from None
        response.set_cookie(
            cookie, secret, max_age=SECONDS_REMEMBERED, httponly=True, samesite="strict"
        )
        return {"rater": known_as}

    @app.get("/api/study")
    def study(secret: Annotated[str, secret_cookie] = "") -> dict[str, Any] | None:
        known = store.rater(secret)
        if known is None:
            return None
        rater, name = known
        return {
            "rater": name,
            "questions": [{"key": key, **QUESTIONS[key]} for key in pairs.questions],
            "trials": [
                {
                    "left": trial.left_id,
                    "right": trial.right_id,
                    "actions": clips[trial.clip].actions,
                    "answers": trial.answers,
                }
                for trial in store.trials(rater)
            ],
        }

    @app.post("/api/answers")
    def answer(given: Answer, secret: Annotated[str, secret_cookie] = "") -> dict[str, bool]:
        known = store.rater(secret)
        if known is None:
            raise HTTPException(401, "this study does not know you: enter your name again")
        try:
            store.answer(known[0], given.trial, given.question, given.choice)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        return {"saved": True}

    @app.get("/media/{media_id}")
    def media(media_id: str) -> Response:
        found = store.video(media_id)
        if found is None:
            raise HTTPException(404, "there is no such video")
        try:
            return Response(playable(pairs.path(*found)), media_type="video/mp4")
        except (OSError, FFmpegError):  # whose words would say which file it is
            raise HTTPException(503, "this video cannot be read any more") from None

    @app.get("/results")
    def results(key: str = "") -> HTMLResponse:
        if not secrets.compare_digest(key.encode(), store.results_key.encode()):
            raise HTTPException(403, "results need the key that diagd study printed at its start")
        return HTMLResponse(results_page(store.results()))

    @app.exception_handler(StarletteHTTPException)
    def refuse(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def misunderstood(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse({"error": f"{where or 'message'}: {first['msg']}"}, 422)

    @app.exception_handler(sqlite3.Error)
    def unsaved(request: Request, error: sqlite3.Error) -> JSONResponse:
        return JSONResponse({"error": f"the answer could not be saved ({error})"}, 503)

    return app


class RequestGuard:
    """Refuse foreign hosts, foreign pages and large messages; forbid pages to load from elsewhere.

    `hosts` are the values of Host (`name`, `name:port`) under which this server is reached.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        send, request = adding_headers(send, _RULES), Request(scope, receive)
        try:
            self._check(request)
            body = await read_body(request, MAX_BODY_BYTES, SECONDS_TO_ASK)
        except StarletteHTTPException as error:
            await JSONResponse({"error": error.detail}, error.status_code)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, replay, send)

    def _check(self, request: Request) -> None:
        headers = request.headers
        host = headers.get("host", "")
        if host.lower() not in self.hosts:
            raise HTTPException(
                421, "this address is not known here: use the one that diagd study printed"
            )
        if check_origin(headers.getlist("origin"), [host]):
            raise HTTPException(403, "this page belongs to another site")
        if request.method == "POST" and headers.get("content-type") != "application/json":
            raise HTTPException(415, "messages must be application/json")
