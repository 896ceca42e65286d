// Dark or light theme: the system's, until the user chooses one.

import { $ } from "./dom.js";

const STORAGE_KEY = "gateway.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function chosen() {
  try {
    return localStorage.getItem(STORAGE_KEY);
  } catch {
    return null; // storage is disabled
  }
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : system.matches;
}

const before = chosen();
if (before === "dark" || before === "light") document.documentElement.dataset.theme = before;

// A toggle button, pressed while the page is dark.
export function themeButton(button) {
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(STORAGE_KEY, theme);
    } catch {
      // Storage is disabled: the choice lasts until the page is closed.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}

const own = $("#theme");
if (own) themeButton(own);
