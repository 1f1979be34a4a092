"""The paper's human evaluation: which of two videos is better? Blind, in the browser.

diagd study --pairs pairs --make 10      # dream ten pairs: raster and k=1
diagd study --pairs pairs                # ask; prints where raters go
diagd study --pairs pairs --results --chart study.png

A rater is known by a secret in a cookie, never by name. Nothing that leaves here says which system
made a video; results, which do, need the key that was printed when the server started.
"""

import hashlib
import secrets
import sqlite3
from collections.abc import Collection
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import uvicorn
from av.error import FFmpegError
from fastapi import Cookie, Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from diagd.console import make_console
from diagd.web.guard import STRICT, listen, read_body, read_json, server_config, url_of
from diagd.web.study.options import StudyOptions
from diagd.web.study.pairs import QUESTIONS, StudyPairs, find_pairs, make_pairs, playable
from diagd.web.study.results import print_results, results_page, write_chart
from diagd.web.study.store import StudyStore

STATIC = Path(__file__).with_name("static")
MAX_NAME = 40
MAX_HEADER_BYTES = 16384
MAX_BODY_BYTES = 4096
MAX_SECONDS_OF_BODY = 10.0
SECONDS_REMEMBERED = 365 * 24 * 3600


@dataclass(frozen=True, config=STRICT)
class Enrolment:  # of a rater, anonymous without a name
    name: Annotated[str, Field(max_length=MAX_NAME)]


@dataclass(frozen=True, config=STRICT)
class Answer:
    trial: Annotated[int, Field(ge=0, le=10**6)]
    question: Annotated[str, Field(max_length=40)]
    choice: Annotated[str, Field(max_length=10)]


def _body(kind: type[Any]) -> Any:
    """Read and validate a request's body: FastAPI by itself reads one of any size, for ever."""

    async def read(request: Request) -> Any:
        data = await read_body(request, MAX_BODY_BYTES, MAX_SECONDS_OF_BODY)
        try:
            return read_json(TypeAdapter(kind), data, "message")
        except ValueError as error:
            raise HTTPException(422, str(error)) from None

    return Depends(read)


def study_server(
    pairs: StudyPairs, store: StudyStore, seed: int, names: Collection[str]
) -> uvicorn.Server:
    app = FastAPI(openapi_url=None)
    _add_raters(app, pairs, store, seed)

    @app.get("/")
    @app.get("/study.js")
    @app.get("/study.css")
    def page(request: Request) -> FileResponse:
        return FileResponse(STATIC / (request.url.path[1:] or "study.html"))

    @app.get("/media/{media_id}")
    def media(media_id: str) -> Response:
        if (found := store.video(media_id)) is None:
            raise HTTPException(404, "no such video")
        system, clip = found
        try:
            return Response(playable(pairs.folder / system / f"{clip}.mp4"), media_type="video/mp4")
        except (OSError, FFmpegError):  # whose words would say which file it is
            raise HTTPException(503, "this video cannot be read any more") from None

    @app.get("/results")
    def results(key: str = "") -> HTMLResponse:
        if not secrets.compare_digest(key.encode(), store.results_key.encode()):
            raise HTTPException(403, "results need the key that diagd study printed at its start")
        return HTMLResponse(results_page(store.results()))

    @app.exception_handler(sqlite3.Error)
    def unsaved(request: Request, error: sqlite3.Error) -> JSONResponse:
        return JSONResponse({"detail": f"the file of answers cannot be used ({error})"}, 503)

    config = server_config(app, names, ws="none", h11_max_incomplete_event_size=MAX_HEADER_BYTES)
    return uvicorn.Server(config)


def _add_raters(app: FastAPI, pairs: StudyPairs, store: StudyStore, seed: int) -> None:
    """Add how raters enrol, are asked, and answer."""
    # cookies know no ports: another study on this machine must not take this one's away
    cookie = f"rater-{hashlib.sha256(store.results_key.encode()).hexdigest()[:12]}"
    secret_cookie = Cookie(alias=cookie, max_length=64)

    @app.post("/api/raters")
    def enrol(given: Annotated[Enrolment, _body(Enrolment)], response: Response) -> dict[str, str]:
        name = " ".join(given.name.split())
        if not name.isprintable():
            raise HTTPException(422, "a name is made of letters, digits and signs")
        try:
            secret, known_as = store.enrol(name, seed)
        except ValueError as error:
            raise HTTPException(409, str(error)) from None
        response.set_cookie(cookie, secret, SECONDS_REMEMBERED, httponly=True, samesite="strict")
        return {"rater": known_as}

    @app.get("/api/study")
    def study(secret: Annotated[str, secret_cookie] = "") -> dict[str, Any] | None:
        if (known := store.rater(secret)) is None:
            return None
        rater, name = known
        return {
            "rater": name,
            "questions": [
                {"key": key, "text": QUESTIONS[key][0], "hint": QUESTIONS[key][1]}
                for key in pairs.questions
            ],
            "trials": [
                {
                    "left": trial.left_id,
                    "right": trial.right_id,
                    "actions": pairs.clips[trial.clip],
                    "answers": trial.answers,
                }
                for trial in store.trials(rater)
            ],
        }

    @app.post("/api/answers")
    def answer(
        given: Annotated[Answer, _body(Answer)], secret: Annotated[str, secret_cookie] = ""
    ) -> dict[str, bool]:
        if (known := store.rater(secret)) is None:
            raise HTTPException(401, "this study does not know you: enter your name again")
        try:
            store.answer(known[0], given.trial, given.question, given.choice)
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        return {"saved": True}


def main(options: StudyOptions) -> dict[str, Any]:
    """Make pairs, ask about them, or print the answers."""
    if options.make:
        systems = make_pairs(options)
        pairs = quote(str(options.pairs))
        make_console().print(f"ask: diagd study --pairs {pairs}", soft_wrap=True)
        return {"pairs": str(options.pairs), "systems": systems, "num_pairs": options.make}
    path = options.answers or options.pairs / "study.db"
    if not options.results:
        return _ask(path, options)
    with closing(StudyStore(path)) as store:
        results = store.results()
    if options.chart is not None:
        write_chart(results, options.chart)
    print_results(results, make_console())
    return results


def _ask(path: Path, options: StudyOptions) -> dict[str, Any]:
    with ExitStack() as opened:
        listening = opened.enter_context(listen(options.host, options.port))
        pairs = find_pairs(options.pairs, options.compare, options.questions)
        store = opened.enter_context(closing(StudyStore(path, pairs)))
        host = (*options.names, options.host)[0]
        address = url_of(host, listening.getsockname()[1]) + "/"
        lines = [f"{first} against {second}" for first, second in pairs.comparisons]
        lines += [f"{len(pairs.clips)} pairs each; answers go to {path}"]
        lines += [f"study    {address}", f"results  {address}results?key={store.results_key}"]
        make_console().print("\n".join(lines), soft_wrap=True)
        with suppress(KeyboardInterrupt):
            study_server(pairs, store, options.seed, options.names).run(sockets=[listening])
    return {"address": address, "answers": str(path)}
