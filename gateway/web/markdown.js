// Markdown of a growing text: complete blocks are drawn once, and only the last block is drawn again.

import { copyText, el, icon } from "./dom.js";
import { inline } from "./inline.js";

const DEEPEST = 8; // maximum nesting of lists and quotes
const MOST_COLUMNS = 64;

// Each expression must match in linear time: no backtracking within a run of spaces or marks.
const FENCE = /^ {0,3}(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|[ \t]+|$)/;
const BLANK = /^\s*$/;

// Draws into `root`. Call `update` with the complete text so far whenever it has grown.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.root.classList.add("markdown");
    this.reset();
  }

  reset() {
    this.root.replaceChildren();
    this.text = "";
    this.begins = 0; // start of the last block, which may still grow
    this.last = null;
  }

  update(text) {
    if (!text.startsWith(this.text)) this.reset();
    this.text = text;
    const blocks = parse(text.slice(this.begins).split("\n"), 0);
    if (!blocks.length) return;
    const first = blocks[0];
    if (this.last && !regrown(this.last, first)) {
      this.last.node.remove();
      this.last = null;
    }
    for (const block of blocks) {
      if (block === first && this.last) block.node = this.last.node;
      else this.root.append((block.node = draw(block, 0)));
    }
    const [last] = blocks.slice(-1);
    this.begins += last.offset;
    this.last = last;
  }
}

// Returns true if both are the same code block, and updates the text that is shown.
function regrown(before, after) {
  if (before.kind !== "code" || after.kind !== "code" || before.language !== after.language) return false;
  const shown = before.node.querySelector("code").firstChild;
  // Text that looked like the start of the closing fence may have been removed.
  if (after.text.startsWith(shown.data)) shown.appendData(after.text.slice(shown.length));
  else shown.data = after.text;
  return true;
}

// Lines -> blocks; `offset` is the index of a block's first character.
function parse(lines, depth) {
  const blocks = [];
  let offset = 0;
  for (let at = 0; at < lines.length; ) {
    const [block, next] = BLANK.test(lines[at]) ? [null, at + 1] : blockAt(lines, at, depth);
    if (block) blocks.push({ ...block, offset });
    for (; at < next; at += 1) offset += lines[at].length + 1;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  let found;
  if ((found = FENCE.exec(line))) return codeAt(lines, at, found);
  if ((found = HEADING.exec(line))) {
    const text = (found[2] ?? "").trim().replace(/(^|\s)#+$/, "");
    return [{ kind: "heading", level: found[1].length, text }, at + 1];
  }
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) {
    const end = endOf(lines, at, (other) => QUOTE.test(other));
    const inner = lines.slice(at, end).map((other) => other.replace(QUOTE, ""));
    return [{ kind: "quote", blocks: parse(inner, depth + 1) }, end];
  }
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, at, depth);
  if (isTable(lines, at)) return tableAt(lines, at);
  const end = endOf(lines, at + 1, (other, n) => !BLANK.test(other) && !interrupts(lines, n));
  const text = lines.slice(at, end).map((other) => other.trim()).join("\n");
  return [{ kind: "paragraph", text }, end];
}

function endOf(lines, from, goesOn) {
  let end = from;
  while (end < lines.length && goesOn(lines[end], end)) end += 1;
  return end;
}

// Returns true if a line ends the paragraph before it.
function interrupts(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return Boolean(item && (/^[-*+]$/.test(item[2]) || /^1[.)]$/.test(item[2]))) || isTable(lines, at);
}

function codeAt(lines, at, [line, fence, language]) {
  const indent = line.length - line.trimStart().length;
  const closes = (other) => {
    const text = other.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  const end = endOf(lines, at + 1, (other) => !closes(other));
  const text = lines.slice(at + 1, end).map((other) => outdented(other, indent)).join("\n");
  return [{ kind: "code", language: language.trim().split(/\s/)[0], text }, Math.min(end + 1, lines.length)];
}

const indentOf = (line) => line.length - line.trimStart().length;
const outdented = (line, width) => line.slice(Math.min(width, indentOf(line)));

function listAt(lines, at, depth) {
  const [, , first] = ITEM.exec(lines[at]);
  const kind = (marker) => marker.slice(-1);
  const items = [];
  let next = at;
  for (let item; next < lines.length && (item = ITEM.exec(lines[next])); ) {
    if (kind(item[2]) !== kind(first) || RULE.test(lines[next])) break;
    const width = item[1].length + item[2].length + (item[3]?.length ?? 1);
    const end = itemEnd(lines, next + 1, width);
    const inner = [lines[next].slice(Math.min(width, lines[next].length)),
      ...lines.slice(next + 1, end).map((other) => outdented(other, width))];
    items.push(parse(inner, depth + 1));
    next = endOf(lines, end, (other) => BLANK.test(other));
    if (next < lines.length && !ITEM.test(lines[next])) {
      next = end;
      break;
    }
  }
  const ordered = /\d/.test(first);
  return [{ kind: "list", ordered, start: parseInt(first, 10), items }, next];
}

// Returns the end of a list item whose text is indented by `width`.
function itemEnd(lines, from, width) {
  let end = from;
  while (end < lines.length) {
    if (BLANK.test(lines[end])) {
      // Blank lines belong to the item if the next text does.
      const after = endOf(lines, end, (line) => BLANK.test(line));
      if (after === lines.length || indentOf(lines[after]) < width) break;
      end = after;
    } else if (indentOf(lines[end]) < width) {
      const goesOn = !BLANK.test(lines[end - 1]) && !interrupts(lines, end) && !ITEM.test(lines[end]);
      if (!goesOn) break;
    }
    end += 1;
  }
  return end;
}

const cellsOf = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function isTable(lines, at) {
  const [head, rule] = [lines[at], lines[at + 1]];
  if (rule === undefined || !head.includes("|") || !rule.includes("-")) return false;
  const cells = cellsOf(rule);
  if (cells.length > MOST_COLUMNS || cells.length !== cellsOf(head).length) return false;
  return cells.every((cell) => /^:?-+:?$/.test(cell));
}

function tableAt(lines, at) {
  const sides = cellsOf(lines[at + 1]).map((cell) => {
    if (!cell.endsWith(":")) return "";
    return cell.startsWith(":") ? "middle" : "right";
  });
  const end = endOf(lines, at + 2, (line) => !BLANK.test(line) && line.includes("|"));
  const rows = lines.slice(at + 2, end).map(cellsOf);
  return [{ kind: "table", head: cellsOf(lines[at]), sides, rows }, end];
}

const DRAW = {
  // Heading levels below those of the page.
  heading: ({ level, text }) => el(`h${Math.min(level + 3, 6)}`, {}, inline(text)),
  paragraph: ({ text }) => el("p", {}, inline(text)),
  rule: () => el("hr"),
  quote: ({ blocks }) => el("blockquote", {}, blocks.map(draw)),
  list: ({ ordered, start, items }) => {
    const settings = ordered && start !== 1 ? { start } : {};
    return el(ordered ? "ol" : "ul", settings, items.map((blocks) => el("li", {}, itemOf(blocks))));
  },
  table: ({ head, sides, rows }) => {
    const row = (cells, tag) =>
      el("tr", {}, sides.map((side, n) => el(tag, { class: side || null }, inline(cells[n] ?? ""))));
    const table = el("table", {}, el("thead", {}, row(head, "th")),
      el("tbody", {}, rows.map((cells) => row(cells, "td"))));
    return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  },
  code: ({ language, text }) => codeBlock(text, language),
};

function draw(block) {
  return DRAW[block.kind](block);
}

// The first paragraph of a list item needs no <p>.
function itemOf(blocks) {
  const [first, ...others] = blocks;
  if (first?.kind !== "paragraph") return blocks.map(draw);
  return [...inline(first.text), ...others.map(draw)];
}

export function codeBlock(text, language = "") {
  const code = el("code", {}, document.createTextNode(text));
  const copy = el("button", { type: "button", class: "button small" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copyText(code.textContent, copy));
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0" }, code));
}
