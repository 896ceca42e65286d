// Inline Markdown: text -> nodes. A model's text is untrusted: it becomes text nodes, and a few types
// of elements. Links may only lead to http and https; pictures are not loaded.

import { el } from "./dom.js";

// Above these limits the text is shown unformatted: nesting costs time and stack depth, and real text stays below.
const MOST_TEXT = 20_000;
const MOST_RUNS = 400;
const MOST_ADDRESS = 2_000;

const SPECIAL = /[\\`![\]<*_~\n]|\bhttps?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
const MARK = /[\p{P}\p{S}]/u;

export function inline(text) {
  if (text.length > MOST_TEXT) return [document.createTextNode(text)];
  return new Line(text).nodes();
}

export function link(address, ...children) {
  const settings = { href: address, rel: "noopener noreferrer", target: "_blank" };
  return el("a", settings, ...children);
}

// Returns the URL of a link if it is http or https, else null.
export function followable(address) {
  try {
    const url = new URL(address);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null; // a relative URL has no meaning here
  }
}

class Line {
  // Parts are strings, nodes, or runs of * _ ~ that may become emphasis later.
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = [];
    this.brackets = [];
    this.runs = 0;
    this.ticks = ticksOf(text);
  }

  nodes() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(this.text);
      const end = found ? found.index : this.text.length;
      if (end > this.at) this.parts.push(this.text.slice(this.at, end));
      this.at = end;
      if (found) this.special(found[0]);
    }
    return emphasized(this.parts).map(asNode);
  }

  special(token) {
    const { text, at } = this;
    const next = text[at + 1] ?? "";
    if (token === "\\" && PUNCTUATION.test(next)) this.take(next, 2);
    else if (token === "\\" && next === "\n") this.take(el("br"), 2);
    else if (token === "`") this.codeSpan();
    else if (token === "!" && next === "[") this.openBracket(2, true);
    else if (token === "[") this.openBracket(1, false);
    else if (token === "]") this.closeBracket();
    else if (token === "<") this.angleLink();
    else if (token === "\n") this.take(el("br"), 1);
    else if (token === "*" || token === "_" || token === "~") this.run(token);
    else if (token.length > 1) this.bareLink();
    else this.take(token, 1);
  }

  take(part, length) {
    this.parts.push(part);
    this.at += length;
  }

  codeSpan() {
    let end = this.at;
    while (this.text[end] === "`") end += 1;
    const length = end - this.at;
    const closing = this.ticks.get(length);
    while (closing.length && closing[0] < end) closing.shift();
    if (!closing.length) return this.take("`".repeat(length), length);
    let code = this.text.slice(end, closing[0]).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && /[^ ]/.test(code)) code = code.slice(1, -1);
    this.take(el("code", {}, code), closing[0] + length - this.at);
  }

  openBracket(length, isPicture) {
    this.brackets.push({ part: this.parts.length, isPicture });
    this.take(isPicture ? "![" : "[", length);
  }

  closeBracket() {
    const bracket = this.brackets.pop();
    const target = bracket && this.text[this.at + 1] === "(" ? this.target(this.at + 2) : null;
    if (!target) return this.take("]", 1);
    const inside = emphasized(this.parts.splice(bracket.part).slice(1)).map(asNode);
    const shown = inside.flatMap(unlinked);
    const address = followable(target.address);
    const words = bracket.isPicture ? ["Picture: ", ...shown] : shown;
    if (address) this.parts.push(link(address, ...words));
    else this.parts.push(el("span", {}, ...words));
    this.at = target.end;
  }

  // Returns the URL after `](`, and the index after its closing parenthesis.
  target(from) {
    const rest = this.text.slice(from, from + MOST_ADDRESS);
    let depth = 0;
    for (let at = 0; at < rest.length; at += 1) {
      if (rest[at] === "\n") return null;
      if (rest[at] === "(") depth += 1;
      if (rest[at] === ")" && depth-- === 0) {
        const [address] = rest.slice(0, at).trim().split(/\s/, 1);
        return { address: address.replace(/^<|>$/g, ""), end: from + at + 1 };
      }
    }
    return null;
  }

  angleLink() {
    const found = /^<(https?:\/\/[^\s<>]*)>/.exec(this.text.slice(this.at, this.at + MOST_ADDRESS));
    const address = found && followable(found[1]);
    if (address) this.take(link(address, found[1]), found[0].length);
    else this.take("<", 1);
  }

  bareLink() {
    const rest = this.text.slice(this.at, this.at + MOST_ADDRESS);
    let [shown] = /^[^\s<>"`|\\*\]]*/.exec(rest);
    while (/[.,:;!?'_~]$/.test(shown) || (shown.endsWith(")") && !shown.includes("("))) {
      shown = shown.slice(0, -1);
    }
    const address = followable(shown);
    if (address) this.take(link(address, shown), shown.length);
    else this.take(this.text[this.at], 1);
  }

  run(character) {
    let end = this.at;
    while (this.text[end] === character) end += 1;
    const length = end - this.at;
    this.runs += 1;
    const wrong = character === "~" && length !== 2;
    if (wrong || this.runs > MOST_RUNS) return this.take(character.repeat(length), length);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[end] ?? " ";
    const opens = !SPACE.test(after) && (!MARK.test(after) || SPACE.test(before) || MARK.test(before));
    const closes = !SPACE.test(before) && (!MARK.test(before) || SPACE.test(after) || MARK.test(after));
    const within = character === "_" && opens && closes; // snake_case
    this.take({
      character, length,
      opens: opens && (!within || MARK.test(before)),
      closes: closes && (!within || MARK.test(after)),
    }, length);
  }
}

// Maps the length of runs of backticks to the indexes where such runs start.
function ticksOf(text) {
  const starts = new Map();
  for (const found of text.matchAll(/`+/g)) {
    const length = found[0].length;
    if (!starts.has(length)) starts.set(length, []);
    starts.get(length).push(found.index);
  }
  return starts;
}

const isRun = (part) => part.character !== undefined && !(part instanceof Node);
const KINDS = { "*1": "em", "_1": "em", "*2": "strong", "_2": "strong", "~2": "del" };

// Replaces each pair of runs, and the parts between them, by an element.
function emphasized(parts) {
  const done = [];
  for (const part of parts) {
    done.push(part);
    if (!isRun(part) || !part.closes) continue;
    while (part.length > 0) {
      const opener = done.findLastIndex(
        (other) => other !== part && isRun(other) && other.opens && other.length > 0 &&
          other.character === part.character);
      if (opener < 0) break;
      const used = Math.min(2, done[opener].length, part.length);
      const inside = done.splice(opener + 1, done.length - opener - 2).map(asNode);
      done.splice(opener + 1, 0, el(KINDS[part.character + used], {}, ...inside));
      done[opener].length -= used;
      part.length -= used;
    }
  }
  return done;
}

function asNode(part) {
  if (part instanceof Node) return part;
  return document.createTextNode(isRun(part) ? part.character.repeat(part.length) : part);
}

const unlinked = (node) => (node.nodeName === "A" ? [...node.childNodes] : [node]);
