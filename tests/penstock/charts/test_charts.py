"""Tests that charts are well-formed SVG for any input, and that points keep their order on every axis."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.charts.bars import BarChart, render_bars
from penstock.charts.html import HtmlReport, ReportSection, ReportTable, render_html
from penstock.charts.scale import Axis, Scale, format_tick
from penstock.charts.svg import Chart, Series, cumulative_points, render_svg

SVG = "{http://www.w3.org/2000/svg}"
X_SIDES, Y_SIDES = ("x", "x1", "x2", "cx"), ("y", "y1", "y2", "cy")

values = st.floats(-1e15, 1e15)
points = st.lists(st.tuples(values, values), max_size=20)


def inside(image: ElementTree.Element) -> None:
    """Checks that nothing lies outside the image."""
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    for each in image.iter():
        assert all(0 <= float(each.get(name, 0)) <= width for name in X_SIDES)
        assert all(0 <= float(each.get(name, 0)) <= height for name in Y_SIDES)
        for pair in each.get("points", "").split():
            left, top = map(float, pair.split(","))
            assert 0 <= left <= width
            assert 0 <= top <= height


def places(image: str) -> list[tuple[float, float]]:
    """Returns the pixels of the first line."""
    line = re.search(r'<polyline points="([^"]+)"', image)
    assert line
    return [(float(left), float(top)) for left, top in (pair.split(",") for pair in line[1].split())]


@given(points, st.booleans(), st.booleans(), st.sampled_from(["line", "step", "dots"]), st.booleans())
@example([(5e-324, 1.0), (0.0, -1.0)], False, False, "line", False)
@example([(1e15, 1e-300), (1e15, 1e15)], True, True, "step", True)
def test_any_points_make_an_image(
    points: list[tuple[float, float]], x_log: bool, y_log: bool, form: str, marked: bool
) -> None:
    series = Series("a < b & c", points, form=form, marked=marked)  # type: ignore[arg-type]
    chart = Chart(
        '"title"', Axis("x", log=x_log), Axis("y", log=y_log), [series, Series("none", [])], marks=[(1.0, "here")]
    )
    text = render_svg(chart)
    image = ElementTree.fromstring(text)
    assert image.findtext(f"{SVG}title") == '"title"', "the file alone says what it shows"
    inside(image)
    assert len(text) < 30_000, "no axis has thousands of ticks"


def test_a_chart_places_points_by_value() -> None:
    found = places(render_svg(Chart("t", Axis("x", log=True), Axis("y"), [Series("s", [(1, 0), (10, 1), (100, 2)])])))
    assert found[1][0] - found[0][0] == pytest.approx(found[2][0] - found[1][0], abs=0.2), "equal factors"
    assert found[0][1] > found[1][1] > found[2][1], "larger values stand higher"


def test_a_step_keeps_its_value_until_the_next_point() -> None:
    found = places(render_svg(Chart("t", Axis("x"), Axis("y"), [Series("s", [(0, 0), (1, 1), (2, 0)], form="step")])))
    assert [first[1] == after[1] for first, after in pairwise(found)] == [True, False, True, False]


def test_a_line_of_one_point_is_a_dot_and_a_long_one_is_thinned() -> None:
    def draw(count: int) -> str:
        return render_svg(Chart("t", Axis("x"), Axis("y"), [Series("s", [(x, x) for x in range(count)])]))

    assert draw(1).count("<circle") == 1
    assert "no data" in draw(0)
    found = places(draw(100_000))
    assert len(found) < 1000
    assert found[-1] == (464.0, 34.0), "the last point stays"


def test_short_labels_share_a_row_in_pairs() -> None:
    def rows(*labels: str) -> int:
        chart = Chart("t", Axis("x"), Axis("y"), [Series(label, [(0, 0), (1, 1)]) for label in labels])
        return (int(ElementTree.fromstring(render_svg(chart)).attrib["height"]) - chart.height) // 16

    assert [rows(""), rows("a"), rows("a", "b"), rows("a", "b", "c"), rows("a", "b" * 60)] == [0, 1, 1, 2, 2]


def test_ticks_are_short() -> None:
    assert [format_tick(value) for value in (0.05, 1500.0, 2e7, 3e12, 0.0)] == ["0.05", "1.5k", "20M", "3T", "0"]
    assert format_tick(0.25, percent=True) == "25%"


def test_a_narrow_logarithmic_axis_has_even_ticks() -> None:
    assert Scale(Axis("x", log=True), [11.0, 19.0], 0, 100).ticks() == pytest.approx([12, 14, 16, 18])
    assert Scale(Axis("x", log=True), [1.0, 100.0], 0, 100).ticks() == pytest.approx([1, 2, 5, 10, 20, 50, 100])


def test_a_cumulative_line_ends_with_all_values() -> None:
    assert cumulative_points([3, 1, 2]) == [(1, 1 / 3), (2, 2 / 3), (3, 1.0)]
    assert cumulative_points([]) == []
    found = cumulative_points(range(10_000))
    assert len(found) == 401
    assert found[-1] == (9999, 1.0)


def test_bars_of_a_row_share_a_scale() -> None:
    text = render_bars(BarChart("a < b", ("seen", "expected"), [("ms", (2.0, 1.0)), ("tokens/s", (0.0, 500.0))]))
    image = ElementTree.fromstring(text)
    inside(image)
    widths = [float(each.attrib["width"]) for each in image.iter(f"{SVG}rect")][-4:]
    assert widths == [400.0, 200.0, 0.0, 400.0]
    ElementTree.fromstring(render_bars(BarChart("t", ("seen", "expected"), [])))


def test_a_page_escapes_its_input() -> None:
    table = ReportTable(("x", "<y>"), [("1", "1"), ("<z>", "-2 %")])
    section = ReportSection("b", ["c & d"], ["<w>"], [table], code="[e]")
    page = render_html(HtmlReport("<a>", (section,), paragraphs=["<p>1"]))
    for text in ("<a>", "<y>", "<z>", "<w>", "<p>1<"):
        assert text not in page
    assert "c &amp; d" in page
    assert '<th>x</th><th class="number">&lt;y&gt;</th>' in page
    assert '<td>1</td><td class="number">1</td>' in page, "a first column that names rows stands to the left"
