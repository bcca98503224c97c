"""Tests the live page in a real browser over real processes: it shows the fleet, a request's path, and a worker that
dies."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from penstock.config import RouterConfig
from penstock.types import Role
from tests.support.plain_processes import Deployment, Process, wait_until_followed
from tests.support.router.browser import CHROMIUM, Page, browser_page
from tests.support.serving import worker_config
from tests.system.test_faults import MODEL

pytestmark = pytest.mark.processes

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
ENGINE = {"num_pages": 256, "dtype": "float32"}
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment() as made:
        yield made


@pytest.fixture(scope="module")
def workers(deployment: Deployment) -> dict[str, Process]:
    configs = [worker_config(Role(name.partition("-")[0]), MODEL, name, engine=ENGINE) for name in WORKERS]
    return dict(zip(WORKERS, deployment.start_workers(configs), strict=True))


@pytest.fixture(scope="module")
def router(deployment: Deployment, workers: dict[str, Process]) -> Process:
    addresses = tuple(each.address for each in workers.values())
    started = deployment.start_router(
        RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, metrics_port=0, workers=addresses)
    )
    wait_until_followed(started, len(WORKERS))
    return started


@pytest.fixture
def page(router: Process) -> Iterator[Page]:
    with browser_page() as opened:
        opened.resize(1280, 900)
        opened.open(f"http://{router.http}/ui/")
        opened.wait_for(f"document.querySelectorAll('.worker').length === {len(WORKERS)}")
        yield opened
        assert opened.problems == []


def test_the_state_holds_the_fleet_and_the_ended_requests(router: Process) -> None:
    with httpx.Client(base_url=f"http://{router.http}", timeout=60) as http:
        answer = http.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 4})
        request_id = answer.json()["id"]
        state = http.get("/ui/state").json()
        assert {worker["id"]: worker["role"] for worker in state["workers"]} == {
            name: name.partition("-")[0] for name in WORKERS
        }
        assert all(worker["ready"] for worker in state["workers"])
        (ended,) = [each for each in state["requests"] if each["request_id"] in request_id]
        assert (ended["output_tokens"], ended["finish_reason"]) == (4, "length")
        assert ended["first_token_ms"] > 0
        newer = http.get("/ui/state", params={"router": state["router"], "after": state["last_request"]}).json()
        assert newer["requests"] == []
        elsewhere = http.get("/ui/state", params={"router": "another", "after": state["last_request"]}).json()
        assert len(elsewhere["requests"]) == len(state["requests"])
        assert http.get("/ui/state", params={"after": "x" * 1000}).status_code == 200
        said = http.get("/ui/controller").json()
        assert said == {"mode": "", "events": [], "scaling": []}  # plain processes have no controller


@needs_browser
def test_a_prompt_is_answered_and_its_path_is_shown(page: Page) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 8")
    page.evaluate("document.querySelector('#play button').click()")
    page.wait_for("document.querySelector('#way .stages') !== null")
    assert page.evaluate("document.getElementById('answer').textContent.length") > 0
    way = page.evaluate("document.getElementById('way').textContent")
    assert "prefill at" in way
    assert "decode at decode-" in way
    page.wait_for("document.querySelectorAll('#requests tbody tr').length > 0")
    page.wait_for("document.querySelector('#figures strong').textContent.endsWith('ms')")


@needs_browser
def test_a_worker_selected_with_the_keyboard_is_described(page: Page) -> None:
    page.evaluate("document.querySelector('[data-worker=\"decode-0\"]').focus()")
    page.evaluate("document.activeElement.click()")
    text = page.wait_for("document.getElementById('worker-detail').textContent")
    assert text.startswith("decode-0 on ")
    assert "takes requests" in text


@needs_browser
def test_the_page_fits_a_phone(page: Page) -> None:
    page.resize(360, 740, dark=True)
    page.wait_for("window.innerWidth <= 400")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(18, 22, 28)"


@needs_browser
def test_a_worker_that_vanishes_is_shown_as_lost_unless_it_was_leaving(page: Page) -> None:
    """A controller removes a dead worker from the membership at once."""
    shown = page.evaluate(
        """(() => {
          const without = (names) => ({ ...kept.state, requests: [],
            workers: kept.state.workers.filter((each) => !names.includes(each.id)) });
          kept.state.workers.find((each) => each.id === "decode-0").leaving = true;
          remember(without([]));
          remember(without(["decode-0", "decode-1"]));
          show(kept.state);
          const figure = [...document.querySelectorAll("#figures strong")].at(-1).textContent;
          return [figure, ...[...document.querySelectorAll(".worker")].map((box) => box.textContent + box.className)];
        })()"""
    )
    figure, *boxes = shown
    assert figure == "1 of 2"
    assert [box for box in boxes if box.startswith("decode")] == ["decode-1lostworker away"]
    page.wait_for("document.querySelectorAll('.worker:not(.away)').length === 3")  # once it is back


@needs_browser
def test_a_killed_worker_is_shown_as_away(page: Page, workers: dict[str, Process]) -> None:
    """Runs last, because the worker stays dead."""
    workers["decode-1"].kill()
    page.wait_for("document.querySelector('[data-worker=\"decode-1\"]').classList.contains('away')")
    assert not page.evaluate("document.querySelector('[data-worker=\"decode-0\"]').classList.contains('away')")
    page.wait_for("[...document.querySelectorAll('#figures strong')].some((each) => each.textContent === '2 of 3')")
