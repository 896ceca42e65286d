// Small SVG chart of the last hour, with a text description and a table of its figures.

import { el } from "../dom.js";
import { setAttribute, setText } from "./update.js";
import { clock, figure, NONE } from "./words.js";

const WIDTH = 320;
const HEIGHT = 72;
const TOP_MARGIN = 4; // above the highest point
const HOUR_S = 3600;
const LEAST_S = 600;
const ROW_S = 300;
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export class Chart {
  /** `lines`: [name, (point, step) => value]; the area below the only line is filled. `least`: minimum value at full height. */
  constructor(title, unit, lines, least) {
    this._title = title;
    this._unit = unit;
    this._lines = lines;
    this._least = least;
    // A pointer may be over the chart before it has data.
    this._values = [];
    this._time = "";
    this._paths = lines.map((_, n) => svg("path", { class: `line line-${n + 1}` }));
    this._area = svg("path", { class: "area" });
    this._mark = svg("line", { class: "at", y1: 0, y2: HEIGHT, x1: -9, x2: -9 });
    this._drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("line", { class: "ground", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
      this._area,
      ...this._paths,
      this._mark,
    );
    this._now = el("span", { class: "now" });
    this._top = el("span", { class: "hint" });
    this._when = el("span", { class: "hint" });
    this._rows = el("tbody");
    const heads = ["From", ...lines.map(([name]) => name)].map((head) => el("th", { scope: "col" }, head));
    const table = el("table", {}, el("caption", { class: "aloud" }, title), el("thead", {}, el("tr", {}, ...heads)), this._rows);
    this._details = el("details", {}, el("summary", {}, "Figures", el("span", { class: "aloud" }, ` of ${title}`)), table);
    this._details.addEventListener("toggle", () => this._tabulate());
    const legend = lines.length < 2 ? [] : lines.map(([name], n) => el("span", { class: `name line-${n + 1}` }, name));
    this.node = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, el("span", { class: "title" }, title), ...legend, this._now),
      this._drawing,
      el("div", { class: "below-chart" }, this._when, this._top),
      this._details,
    );
    this._drawing.addEventListener("pointermove", (event) => this._point(event));
    this._drawing.addEventListener("pointerleave", () => this._point(null));
  }

  /** `points`: [time, point] sorted by time, one each `step` seconds. */
  show(points, step, now) {
    this._values = points.map(([time, point]) => [time, this._lines.map(([, value]) => value(point, step))]);
    // A gateway that has just started has data for only a part of the hour.
    const known = now - (points[0]?.[0] ?? now);
    this._span = Math.min(HOUR_S, Math.max(LEAST_S, Math.ceil(known / LEAST_S) * LEAST_S));
    this._from = now - this._span;
    this._time = this._span === HOUR_S ? "last hour" : `last ${this._span / 60} min`;
    const all = this._values.flatMap(([, values]) => values.filter((value) => value !== undefined));
    this._highest = Math.max(0, ...all);
    const scale = Math.max(this._highest, this._least);
    this._paths.forEach((path, n) => setAttribute(path, "d", this._path(n, scale, step)));
    setAttribute(this._area, "d", this._areaOf(scale, step));
    setAttribute(this._drawing, "aria-label", this._inWords());
    setText(this._top, all.length ? `highest ${this._figure(this._highest)}` : "");
    this._point(null);
    if (this._details.open) this._tabulate();
  }

  _figure = (value) => (value === undefined ? NONE : `${figure(value)}${this._unit ? ` ${this._unit}` : ""}`);

  _latest() {
    return this._values.at(-1)?.[1] ?? this._lines.map(() => undefined);
  }

  _inWords() {
    if (this._values.length === 0) return `${this._title}: nothing yet.`;
    const now = this._lines.map(([name], n) => `${this._lines.length > 1 ? `${name} ` : ""}${this._figure(this._latest()[n])}`);
    return `${this._title} in the ${this._time}: now ${now.join(", ")}; highest ${this._figure(this._highest)}.`;
  }

  _x = (time) => (((time - this._from) / this._span) * WIDTH).toFixed(1);

  // Leave a gap if data is missing, instead of an invented line.
  _path(n, scale, step) {
    let path = "";
    let last = -Infinity;
    for (const [time, values] of this._values) {
      if (values[n] === undefined) continue;
      path += `${time - last > step * 1.5 ? "M" : "L"}${this._x(time)} ${y(values[n], scale)}`;
      last = time;
    }
    return path;
  }

  _areaOf(scale, step) {
    const line = this._path(0, scale, step);
    if (this._lines.length > 1 || !line) return "";
    return line
      .split("M")
      .filter(Boolean)
      .map((part) => {
        const ends = part.split("L");
        const [first, last] = [ends[0].split(" ")[0], ends.at(-1).split(" ")[0]];
        return `M${first} ${HEIGHT}L${part}L${last} ${HEIGHT}Z`;
      })
      .join("");
  }

  // Shows the values under the pointer, else the latest values.
  _point(event) {
    let found = null;
    if (event && this._values.length) {
      const box = this._drawing.getBoundingClientRect();
      const time = this._from + ((event.clientX - box.left) / box.width) * this._span;
      found = this._values.reduce((a, b) => (Math.abs(b[0] - time) < Math.abs(a[0] - time) ? b : a));
    }
    const at = found ? this._x(found[0]) : "-9";
    setAttribute(this._mark, "x1", at);
    setAttribute(this._mark, "x2", at);
    setText(this._when, found ? clock(found[0]) : this._time);
    const values = (found ? found[1] : this._latest()).map((value) => figure(value));
    setText(this._now, `${values.join(" / ")} ${this._unit}`);
  }

  _tabulate() {
    if (!this._details.open) return;
    const groups = new Map();
    for (const [time, values] of this._values) {
      const from = time - (time % ROW_S);
      groups.set(from, [...(groups.get(from) ?? []), values]);
    }
    const rows = [...groups].reverse().map(([from, all]) => {
      const cells = this._lines.map((_, n) => el("td", {}, this._figure(mean(all.map((values) => values[n])))));
      return el("tr", {}, el("th", { scope: "row" }, clock(from)), ...cells);
    });
    this._rows.replaceChildren(...rows);
  }
}

const y = (value, scale) => (HEIGHT - (value / scale) * (HEIGHT - TOP_MARGIN)).toFixed(1);

function mean(values) {
  const known = values.filter((value) => value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : undefined;
}
