// Tokens as small tiles: text above, id below, coloured by log-probability.

import { make } from "./dom.js";
import * as format from "./format.js";

// Each colour holds from its bound on; the words are probabilities.
const BOUNDS = [-0.105, -0.693, -2.303, -4.605, -6.908];
const WORDS = ["≥ 90 %", "≥ 50 %", "≥ 10 %", "≥ 1 %", "≥ 0.1 %", "less"];
const NAMES = { "\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣" };

function colorOf(value) {
  if (value === null) return "p5";
  const index = BOUNDS.findIndex((bound) => value >= bound);
  return `p${index < 0 ? BOUNDS.length : index}`;
}

/** What the colours mean. */
export function scale() {
  return make("ul", { class: "scale", "aria-label": "Colours: probability of the sampled token" },
    make("li", { class: "what" }, "probability"), ...WORDS.map((word, index) => make("li", { class: `p${index}` }, word)));
}

/**
 * A list of tokens. With log-probabilities it is a listbox: arrow keys move in it, and `detail` shows
 * the chosen token's figures.
 * @param {number[]} ids
 * @param {?string[]} pieces
 * @param {?(?number)[]} logprobs
 */
export function tokenList(ids, pieces, logprobs = null, detail = null) {
  if (!ids.length) return make("p", { class: "help" }, "No token.");
  const items = ids.map((id, index) => tokenItem(id, pieces?.[index], logprobs?.[index]));
  if (!logprobs) return make("ul", { class: "tokens", tabindex: 0, "aria-label": "Tokens of the prompt" }, ...items);
  const list = make("ul", { class: "tokens", id: "tokens", role: "listbox", "aria-label": "Sampled tokens", "aria-orientation": "horizontal" }, ...items);
  let chosen = 0;
  items[0].tabIndex = 0;
  const choose = (index, takesFocus) => {
    items[chosen].tabIndex = -1;
    items[chosen].setAttribute("aria-selected", "false");
    chosen = index;
    items[chosen].tabIndex = 0;
    items[chosen].setAttribute("aria-selected", "true");
    if (takesFocus) items[chosen].focus();
    detail.replaceChildren(...detailOf(index, ids[index], pieces?.[index], logprobs[index]));
  };
  list.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(ids.length - 1, chosen + step)), true);
  });
  for (const type of ["click", "focusin"]) {
    list.addEventListener(type, (event) => {
      const index = items.indexOf(event.target.closest("li"));
      if (index >= 0) choose(index, false);
    });
  }
  return list;
}

function tokenItem(id, piece, logprob) {
  const isSampled = logprob !== undefined;
  return make("li", {
    class: `token ${isSampled ? colorOf(logprob) : ""}`, role: isSampled ? "option" : null,
    "aria-selected": isSampled ? "false" : null, tabindex: isSampled ? -1 : null,
    "aria-label": isSampled ? `${piece ?? ""} id ${id}, log-probability ${format.logprob(logprob)}` : null,
    title: isSampled ? `log-probability ${format.logprob(logprob)}` : null,
  }, piece === undefined || piece === null ? null : make("span", { class: piece.trim() ? null : "blank" }, visible(piece)), make("i", {}, String(id)));
}

function detailOf(index, id, piece, logprob) {
  const probability = logprob === null ? 0 : Math.exp(logprob);
  const shown = probability >= 0.001 ? `${(100 * probability).toPrecision(3)} %` : probability.toExponential(1);
  const parts = [`Token ${index}: id `, make("b", {}, String(id))];
  if (piece !== undefined && piece !== null) parts.push(", text ", make("b", { class: "mono" }, JSON.stringify(piece)));
  return [...parts, ", log-probability ", make("b", {}, format.logprob(logprob)), `, probability ${shown}`];
}

/** Blanks that a reader would not see; "" is a part of a character that a later token completes. */
export function visible(piece) {
  if (piece === "") return "◌";
  const named = piece.replace(/[\n\t\r]/g, (character) => NAMES[character]);
  return named.trim() ? named : named.replaceAll(" ", NAMES[" "]);
}
