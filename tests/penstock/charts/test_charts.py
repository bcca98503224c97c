"""Charts are well-formed SVG whatever they are given, and points keep their order on every axis."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.charts.page import Page, PageSection, PageTable, render_page
from penstock.charts.svg import Axis, Chart, Series, format_tick, render_svg

values = st.floats(-1e15, 1e15)
points = st.lists(st.tuples(values, values), max_size=20)


@given(points, st.booleans(), st.booleans(), st.sampled_from(["line", "step", "dots"]))
def test_any_points_make_an_image(points: list[tuple[float, float]], x_log: bool, y_log: bool, form: str) -> None:
    series = Series("a < b & c", points, form=form)  # type: ignore[arg-type]
    chart = Chart('"title"', Axis("x", log=x_log), Axis("y", log=y_log), [series], marks=[(1.0, "here")])
    image = ElementTree.fromstring(render_svg(chart))
    for each in image.iter():
        for name in ("x", "y", "x1", "y1", "x2", "y2", "cx", "cy"):
            assert -100 <= float(each.get(name, 0)) <= 1000, "nothing stands outside"


def test_a_chart_places_points_by_value() -> None:
    image = render_svg(Chart("t", Axis("x", log=True), Axis("y"), [Series("s", [(1, 0), (10, 1), (100, 2)])]))
    line = re.search(r'<polyline points="([^"]+)"', image)
    assert line
    places = [tuple(map(float, pair.split(","))) for pair in line[1].split()]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2), "equal factors"
    assert places[0][1] > places[1][1] > places[2][1], "larger values stand higher"


def test_ticks_are_short() -> None:
    assert [format_tick(value) for value in (0.05, 1500.0, 2e7, 3e12, 0.0)] == ["0.05", "1.5k", "20M", "3T", "0"]
    assert format_tick(0.25, percent=True) == "25%"


def test_a_page_escapes_what_it_is_given() -> None:
    page = render_page(Page("<a>", (PageSection("b", ["c & d"], [PageTable(("x",), [("1",), ("<z>",)])], code="[e]"),)))
    assert "<a>" not in page
    assert "c &amp; d" in page
    assert '<td class="number">1</td>' in page
