// "31 of 60" with a bar. Screen readers get only the figures.

import { el } from "../dom.js";
import { setAttribute, setText } from "./update.js";
import { figure } from "./words.js";

const NEARLY = 0.8;

export function bar() {
  const figures = el("span", { class: "figures" });
  const fill = el("span", { class: "fill" });
  const track = el("span", { class: "track", "aria-hidden": "true" }, fill);
  return { node: el("span", { class: "bar-of" }, figures, track), figures, fill };
}

/** Without `of` there is no limit and no bar. If `isLimit` is false, a full bar is no warning. */
export function setBar(it, used, of, isLimit = true) {
  setText(it.figures, of === undefined ? figure(used) : `${figure(used)} of ${figure(of)}`);
  const part = of ? Math.min(1, used / of) : 0;
  const width = `${Math.round(part * 100)}%`;
  if (it.fill.style.width !== width) it.fill.style.width = width;
  setAttribute(it.node, "data-level", levelOf(part, of, isLimit));
}

function levelOf(part, of, isLimit) {
  if (!of) return "none";
  if (!isLimit) return "fine";
  if (part >= 1) return "full";
  return part >= NEARLY ? "nearly" : "fine";
}
