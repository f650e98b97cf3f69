"""The dashboard as an ASGI application: its addresses, and what is answered there. Read-only."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from holter.dashboard.bodies import Body, answer, complaint, json_body
from holter.dashboard.comparisons import Comparisons
from holter.dashboard.desk import Desk
from holter.dashboard.details import layer_detail, whole_map, zoomed
from holter.dashboard.examinations import Examination, Examinations
from holter.dashboard.guard import App, Door, Guard
from holter.dashboard.listing import Lister, layers_found
from holter.dashboard.shelf import Listed, Shelf
from holter.dashboard.static import pages, static_files
from holter.report.examining import Examined
from holter.report.reading import Follower
from holter.report.view import run_view
from holter.words import printable

_log = logging.getLogger(__name__)

_POLL = 0.5  # seconds between two looks at a run that is followed
_KEEP_ALIVE = 10.0
_FRESH, _STALE = 0.5, 5.0  # seconds for which a list is as good as new, and for which it is good enough
_IDLE = 0.3
_MOST_COMPARED = 8
_NOT_YET = {"state": "unknown", "severity": None, "sentence": "Not examined yet."}
_FARTHEST = 2**62


def create_app(root: Path, door: Door, is_closing: Callable[[], bool] = lambda: False) -> App:
    """`is_closing` tells streams when to end."""
    return Guard(Dashboard(root, is_closing).app, door)


class Dashboard:
    """All state lives here: the runs, those that are open, what is known of them."""

    def __init__(self, root: Path, is_closing: Callable[[], bool]) -> None:
        self.shelf, self.desk, self.examinations = Shelf(root), Desk(), Examinations()
        self._is_closing = is_closing
        self._files = static_files()
        self._pages = pages(self._files)
        self._lister = Lister(self.shelf)
        self._listing: Body | None = None
        self._listed_at = 0.0
        self._listing_lock = anyio.Lock()
        self._comparisons = Comparisons()
        self.app = Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/", self._page("runs")),
                Route("/run/{run}", self._page("run")),
                Route("/compare", self._page("compare")),
                Route("/static/{file}", self.static),
                Route("/api/runs", self.runs),
                Route("/api/layers", self.layers),
                Route("/api/compare", self.compare),
                Route("/api/run/{run}", self.run),
                Route("/api/run/{run}/layer", self.layer),
                Route("/api/run/{run}/map", self.map),
                Route("/api/run/{run}/zoom", self.zoom),
                Route("/api/run/{run}/events", self.events),
            ],
        )
        self.app.router.redirect_slashes = False  # a redirect would repeat what was asked

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._examine())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            await self.examinations.stop()

    async def _examine(self) -> None:
        """The background: one run after the other, as long as somebody looks."""
        while True:
            runs = self._known
            self.examinations.forget(runs)
            self.desk.tidy()
            due = self.examinations.next(runs.values())
            if due is None:
                await asyncio.sleep(_IDLE)
                continue
            try:
                await self.examinations.examine(due)
            except Exception:  # the list stays without this verdict, and goes on
                _log.exception("cannot examine %s", due.name)
                await asyncio.sleep(_IDLE)

    # Pages and files ------------------------------------------------------------------------------------------------

    def _page(self, page: str) -> Callable[[Request], Any]:
        async def show(request: Request) -> Response:
            return answer(request, self._pages[page], keep=True)

        return show

    async def static(self, request: Request) -> Response:
        found = self._files.get(request.path_params["file"])
        return answer(request, found, keep=True) if found else complaint(request, 404, "there is no such file")

    # The list -------------------------------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        self.examinations.attend()
        return answer(request, await self._list(), keep=True)

    async def _list(self) -> Body:
        """As it was a moment ago, where that is being looked at again for somebody else; nobody waits for a disk."""
        age = time.monotonic() - self._listed_at
        if self._listing is not None and age < (_STALE if self._listing_lock.locked() else _FRESH):
            return self._listing
        async with self._listing_lock:
            if self._listing is None or time.monotonic() - self._listed_at >= _FRESH:
                known = dict(self.examinations.known)
                self._listing = await to_thread.run_sync(self._lister.body, known, self.examinations.trouble)
                self._listed_at = time.monotonic()
            return self._listing

    async def layers(self, request: Request) -> Response:
        """Which runs have layers that are called like that."""
        terms = request.query_params.get("search", "").lower().split()
        runs = await to_thread.run_sync(self.shelf.runs)
        return answer(request, await to_thread.run_sync(layers_found, self.shelf, runs, terms))

    # One run --------------------------------------------------------------------------------------------------------

    async def run(self, request: Request) -> Response:
        maps = request.query_params.getlist("map")
        asked = tuple(maps) if maps else None

        def view(follower: Follower, examination: Examination | None, listed: Listed) -> dict[str, Any]:
            return _view(follower, examination, listed, asked)

        return await self._of_run(request, ("view", asked), view)

    async def layer(self, request: Request) -> Response:
        name = request.query_params.get("layer", "")
        return await self._of_run(request, ("layer", name), lambda follower, *_: layer_detail(follower, name))

    async def _of_run(self, request: Request, key: Hashable, make: Callable[..., Any]) -> Response:
        listed = await self._find(request.path_params["run"])
        if listed is None:
            return complaint(request, 404, "there is no such run")
        listed = await to_thread.run_sync(self.shelf.look_again, listed)
        if not listed.signature:
            return complaint(request, 422, printable(listed.glance.trouble))
        self.examinations.attend(listed.id)
        known = self.examinations.of(listed)
        all_of_it = key, listed.glance.state, known.version if known else 0
        try:
            found = await self.desk.ask(listed, all_of_it, lambda follower: make(follower, known, listed))
        except Exception as error:  # whatever is wrong with this run, the others are shown
            return self._cannot_show(request, listed, error)
        return answer(request, found)

    def _cannot_show(self, request: Request, listed: Listed, error: Exception) -> Response:
        if not isinstance(error, OSError | ValueError):
            _log.warning("cannot show %s", listed.name, exc_info=error)
        return complaint(request, 422, _words(error))

    async def map(self, request: Request) -> Response:
        """One strip chart, as the run page first shows it."""
        wanted = request.query_params.get("map", "")
        return await self._of_run(request, ("map", wanted), lambda follower, *_: whole_map(follower, wanted))

    async def zoom(self, request: Request) -> Response:
        """Some steps of one strip chart, finer."""
        listed = await self._find(request.path_params["run"])
        if listed is None or not listed.signature:
            return complaint(request, 404, "there is no such run")
        asked = request.query_params
        first, last = _whole(asked.get("from")), _whole(asked.get("to"))
        if first is None or last is None or last < first:
            return complaint(request, 400, "from and to are steps")
        try:
            found = await self.desk.in_thread(zoomed, listed.path, asked.get("map", ""), first, last)
        except Exception as error:
            return self._cannot_show(request, listed, error)
        return answer(request, json_body(found))

    async def events(self, request: Request) -> Response:
        listed = await self._find(request.path_params["run"])
        if listed is None:
            return complaint(request, 404, "there is no such run")
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(
            self._news(listed), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _news(self, listed: Listed) -> AsyncIterator[str]:
        """An event whenever there is something new to fetch. Ends when the client leaves: Starlette stops it."""
        told: object = None
        quiet = 0.0
        yield "retry: 2000\n\n"
        while not self._is_closing():
            self.examinations.attend(listed.id)
            listed = await to_thread.run_sync(self.shelf.look_again, listed)
            news = await self._state_of(listed)
            if news != told:
                told, quiet = news, 0.0
                yield f"data: {json.dumps(news, allow_nan=False)}\n\n"
            elif quiet >= _KEEP_ALIVE:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(_POLL)
            quiet += _POLL

    async def _state_of(self, listed: Listed) -> dict[str, Any]:
        trouble = listed.blocked or ("" if listed.signature else listed.glance.trouble)
        if trouble:
            return {"state": listed.glance.state, "trouble": printable(trouble)}
        try:
            one = await self.desk.read_on(listed)
        except Exception as error:  # whatever is wrong with this run, it may be over the next time
            return {"state": listed.glance.state, "trouble": _words(error)}
        known = self.examinations.of(listed)
        return {
            "version": one.version,
            "state": listed.glance.state,
            "steps": listed.glance.steps,
            "examined": known.version if known else 0,
            "complete": one.is_complete,
        }

    # Several runs ---------------------------------------------------------------------------------------------------

    async def compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        if not 2 <= len(names) <= _MOST_COMPARED:
            return complaint(request, 400, f"name two runs, or up to {_MOST_COMPARED}")
        found = [await self._find(name) for name in names]
        listed = [one for one in found if one is not None and one.signature]
        if len(listed) < len(names):
            return complaint(request, 404, "there is no such run")
        self.examinations.attend()
        listed = [await to_thread.run_sync(self.shelf.look_again, one) for one in listed]  # one may be growing
        try:
            return answer(request, await self._comparisons.of(listed))
        except ValueError as error:
            return complaint(request, 422, _words(error))

    async def _find(self, asked: str) -> Listed | None:
        return await to_thread.run_sync(self.shelf.find, asked)

    @property
    def _known(self) -> dict[str, Listed]:
        return self.shelf.latest


def _whole(text: str | None) -> int | None:
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 20):
        return None
    return min(int(text), _FARTHEST)


def _words(error: Exception) -> str:
    """Without the path, which is no business of whoever asks."""
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _view(
    follower: Follower, examination: Examination | None, listed: Listed, maps: tuple[str, ...] | None
) -> dict[str, Any]:
    answered = examination.answer if examination else None
    view = run_view(follower, answered.examined if answered else Examined(), maps)
    if answered is None:
        view["verdict"] = _NOT_YET
        if examination is not None and examination.trouble:
            view["verdict"] = {**_NOT_YET, "sentence": f"Not examined: {printable(examination.trouble)}"}
    view["run"] |= {"id": listed.id, "name": listed.name}
    if follower.is_sample:
        view["run"]["steps"] = listed.glance.steps
    return view
