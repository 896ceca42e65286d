// Builds elements from text and other elements, never from markup.

// Settings that `el` assigns as properties; all others are attributes.
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "textContent", "htmlFor"]);

// el("button", {class: "button", onclick: run}, "Run") -> HTMLButtonElement
// Children may be lists of children.
export function el(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(settings)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) made[name] = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else made.setAttribute(name, value);
  }
  // One by one: there may be more children than a call can have arguments.
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

export const $ = (selector, within = document) => within.querySelector(selector);

// One path each, in a view box of 24 by 24.
const ICONS = {
  add: "M12 5v14M5 12h14",
  chevron: "m6 9 6 6 6-6",
  close: "M6 6l12 12M18 6 6 18",
  code: "m8 7-5 5 5 5M16 7l5 5-5 5",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "m5 12.5 4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  key: "M14.5 14.5a5 5 0 1 0-4.4-4.4L4 16.2V20h4v-2.5h2.5V15zM16 8h.01",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  retry: "M20 11a8 8 0 1 0-.7 4.5M20 5v6h-6",
  send: "M12 19V5M6 11l6-6 6 6",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 5v4M9 15v4",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v1M12 20v1M3 12h1M20 12h1M5.6 5.6l.7.7M17.7 17.7l.7.7M5.6 18.4l.7-.7M17.7 6.3l.7-.7",
  tokens: "M3 8h8v8H3zM14 8h3v8h-3zM20 8h1v8h-1",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};
const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

// Adds an icon to each element that names one: <button data-icon="stop">.
export function drawIcons(within = document) {
  for (const node of within.querySelectorAll("[data-icon]")) {
    node.prepend(icon(node.dataset.icon));
    delete node.dataset.icon;
  }
}

// A button with an icon, and a label for screen readers.
export function iconButton(name, label, run, kind = "small") {
  const settings = { type: "button", class: `button icon-only ${kind}`, "aria-label": label };
  return el("button", { ...settings, title: label, onclick: run }, icon(name));
}

// Enter in `area` submits its form; Shift+Enter starts a new line.
export function sendOnEnter(area) {
  area.addEventListener("keydown", (event) => {
    // In an input method (Chinese, Japanese), Enter selects a character.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    area.form.requestSubmit();
  });
}

let status;

// Announces `text` to screen readers. Use it for results, not for every step.
export function announce(text) {
  if (!status) document.body.append((status = el("div", { class: "aloud", role: "status" })));
  status.textContent = "";
  setTimeout(() => (status.textContent = text), 60);
}

const copied = new WeakSet(); // buttons that show the check mark now

export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyTheOldWay(text); // pages from plain HTTP have no clipboard API, and browsers may refuse it
  }
  announce("Copied.");
  if (copied.has(button)) return;
  copied.add(button);
  const before = [...button.childNodes];
  button.replaceChildren(icon("done"), ...before.filter((node) => node.nodeName !== "svg"));
  setTimeout(() => {
    button.replaceChildren(...before);
    copied.delete(button);
  }, 1500);
}

function copyTheOldWay(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "aloud", value: text });
  (focused.closest("dialog") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused.focus();
}
