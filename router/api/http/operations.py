"""Adds the calls that report a router's state: probes, version, load and metrics. None of them generates."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from router.api.dialect import ErrorShape
from router.api.http.error_answers import ErrorAnswers
from router.api.http.openapi.document import add_documents, answers
from router.api.http.request_ids import RequestIdMiddleware
from router.api.prepare import RequestPreparer
from router.metrics.metrics import RouterMetrics
from router.metrics.scrape_targets import ScrapeTarget

_PROBES = answers(200, 503, error=False)


def make_operations_app(
    preparer: RequestPreparer,
    metrics: RouterMetrics,
    metrics_token: Callable[[], str] = lambda: "",
    shapes: Mapping[str, ErrorShape] = MappingProxyType({}),
    targets: Callable[[], Sequence[ScrapeTarget]] | None = None,
) -> FastAPI:
    """Returns an app that reports this router's state and serves no model, for a port that only operators reach.

    /metrics and /load require the `metrics_token` unless it is "". `shapes` are error formats, as `ErrorAnswers` takes
    them. `targets` returns the workers' metrics ports, which /metrics/targets lists; without it there is no such call.
    """
    app = FastAPI(title="Penstock", version=_version(), docs_url=None, redoc_url=None, openapi_url=None)
    _add_probes(app, preparer)
    _add_figures(app, preparer, metrics, metrics_token, targets)
    app.add_middleware(RequestIdMiddleware)
    ErrorAnswers(shapes, metrics).add_to(app)
    add_documents(app)
    return app


def _add_probes(app: FastAPI, preparer: RequestPreparer) -> None:
    """Adds the calls that need no credentials: health and version."""

    @app.get("/health", responses=_PROBES)
    @app.get("/health/ready", responses=_PROBES)
    @app.get("/ready", responses=_PROBES)
    async def health() -> Response:
        """Answers 200 if the router can serve a request now, else 503 with the reason."""
        ready = preparer.ready
        reason = "leaving" if preparer.leaving else "no decode worker"
        return JSONResponse({"status": "ready" if ready else reason}, 200 if ready else 503)

    @app.get("/health/live")
    @app.get("/live")
    async def live() -> Response:
        """Answers 200 as long as the process responds, even if it can serve no request: do not restart it then."""
        return JSONResponse({"status": "live"})

    @app.get("/version")
    async def version() -> Response:
        """Returns the version of Penstock."""
        return JSONResponse({"version": _version()})


def _add_figures(
    app: FastAPI,
    preparer: RequestPreparer,
    metrics: RouterMetrics,
    metrics_token: Callable[[], str],
    targets: Callable[[], Sequence[ScrapeTarget]] | None,
) -> None:
    """Adds the calls that require the metrics token: load, metrics and, if given, the workers' metrics ports."""

    def check(http: Request) -> None:
        preparer.tenants.check_scraper(http.headers.get("authorization"), metrics_token())

    @app.get("/load", responses=answers(401))
    async def load(http: Request) -> Response:
        """Returns the number of requests in flight at this router, and how many of them are queued."""
        check(http)
        num_inflight, num_waiting = preparer.inflight
        return JSONResponse({"server_load": num_inflight, "num_waiting": num_waiting})

    @app.get("/metrics", responses=answers(401), response_class=PlainTextResponse)
    async def scrape(http: Request) -> Response:
        """Returns the router's metrics in Prometheus' format."""
        check(http)
        return Response(await metrics.render_aside(), media_type=CONTENT_TYPE_LATEST)

    if targets is not None:

        @app.get("/metrics/targets", responses=answers(401))
        async def scrape_targets(http: Request) -> Response:
            """Lists the workers' metrics ports in the format of Prometheus' HTTP service discovery."""
            check(http)
            return JSONResponse([target.to_json() for target in targets()])


def _version() -> str:
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
