// Dark or light: as the system has it, until somebody chooses here.

import { $ } from "./dom.js";

const KEPT = "gateway.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null; // a browser that keeps nothing
  }
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : system.matches;
}

const before = chosen();
if (before === "dark" || before === "light") document.documentElement.dataset.theme = before;

// A button that is pressed while the page is dark.
export function themeButton(button) {
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(KEPT, theme);
    } catch {
      // It lasts as long as the page, then.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}

const own = $("#theme");
if (own) themeButton(own);
