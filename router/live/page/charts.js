"use strict";
// Line charts in SVG, without a library, so that the page loads nothing from other sites.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Returns a round number at or above `value`: 1, 2 or 5 times a power of ten.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// Shows lines of [time, value] points, with the newest at the right. `target` is the value of a horizontal line, which is
// shown if it is not far above the points.
function drawChart(id, lines, { from, to, format, target }) {
  const svg = document.getElementById(id);
  const width = svg.clientWidth || 300, height = svg.clientHeight || 150;
  const left = 52, bottom = 18, top = 8;
  const values = lines.flatMap((line) => line.points.map((point) => point[1]));
  const highest = Math.max(0, ...values);
  const shown = target && target <= highest * 4 ? Math.max(target, highest) : highest;
  const max = roundUp(shown * 1.05);
  const x = (time) => left + ((time - from) / (to - from)) * (width - left);
  const y = (value) => top + (1 - value / max) * (height - top - bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  for (const share of [0, 0.5, 1]) {
    svg.append(element("line", { class: "grid", x1: left, x2: width, y1: y(max * share), y2: y(max * share) }));
    svg.append(element("text", { x: left - 6, y: y(max * share) + 4, "text-anchor": "end" }, format(max * share)));
  }
  const step = to - from > 150 ? 60 : to - from > 90 ? 30 : 15;  // seconds between two labels
  for (let age = step; age <= to - from; age += step) {
    const text = step === 60 ? `-${age / 60} min` : `-${age} s`;
    svg.append(element("text", { x: x(to - age), y: height - 4 }, text));
  }
  if (target && target <= max) {
    svg.append(element("line", { class: "target", x1: left, x2: width, y1: y(target), y2: y(target) }));
  }
  for (const line of lines) {
    let path = "", last = null;
    for (const [time, value] of line.points) {
      path += `${last === null || time - last > line.gap ? "M" : "L"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
      last = time;
    }
    svg.append(element("path", { d: path, stroke: line.color }));
    if (line.points.length === 1) {
      const [time, value] = line.points[0];
      svg.append(element("circle", { cx: x(time), cy: y(value), r: 2.5, fill: line.color }));
    }
  }
  const legend = document.querySelector(`[data-for="${id}"]`);
  legend.replaceChildren(...lines.map((line) => {
    const item = document.createElement("span"), mark = document.createElement("b");
    mark.style.background = line.color;
    item.append(mark, line.name);
    return item;
  }));
}
