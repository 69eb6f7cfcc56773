// Two lists of token ids side by side: what tokenizing a text again would change.

import { make } from "./dom.js";
import { visible } from "./tokens.js";

// Longer lists are compared at their ends only: the table of lengths grows with their product.
const MAX_CELLS = 4_000_000;

/**
 * Runs of equal and of different ids, in order, by the longest common subsequence.
 * @returns {{isSame: boolean, before: number[], after: number[], start: number}[]} `start` is the
 *   place of the run in `before`
 */
export function compare(before, after) {
  let head = 0;
  while (head < Math.min(before.length, after.length) && before[head] === after[head]) head++;
  let tail = 0;
  while (tail < Math.min(before.length, after.length) - head && before.at(-1 - tail) === after.at(-1 - tail)) tail++;
  const a = before.slice(head, before.length - tail);
  const b = after.slice(head, after.length - tail);
  const steps = [
    ...before.slice(0, head).map(() => "same"),
    ...(a.length * b.length > MAX_CELLS ? [...a.map(() => "before"), ...b.map(() => "after")] : stepsOf(a, b)),
    ...before.slice(before.length - tail).map(() => "same"),
  ];
  return runsOf(steps, before, after);
}

function stepsOf(a, b) {
  const width = b.length + 1;
  const lengths = new Uint32Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] = a[i] === b[j]
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const steps = [];
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      steps.push("same");
      i++;
      j++;
    } else if (j >= b.length || (i < a.length && lengths[(i + 1) * width + j] >= lengths[i * width + j + 1])) {
      steps.push("before");
      i++;
    } else {
      steps.push("after");
      j++;
    }
  }
  return steps;
}

function runsOf(steps, before, after) {
  const runs = [];
  let i = 0;
  let j = 0;
  for (const step of steps) {
    const isSame = step === "same";
    if (runs.at(-1)?.isSame !== isSame) runs.push({ isSame, before: [], after: [], start: i });
    if (step !== "after") runs.at(-1).before.push(before[i++]);
    if (step !== "before") runs.at(-1).after.push(after[j++]);
  }
  return runs;
}

/** The runs as a table; differences have a mark, not only a colour. */
export function runsTable(runs, pieces) {
  const rows = runs.map((run) => {
    const text = pieces?.slice(run.start, run.start + run.before.length).map(visible).join("") ?? "";
    return make("tr", { class: run.isSame ? "same" : "differs" },
      make("td", {}, text), make("td", {}, run.before.join(" ")),
      make("td", { class: "mark" }, run.isSame ? "=" : "≠"), make("td", {}, run.after.join(" ")));
  });
  const head = ["text", "sampled ids", "", "ids of the text"].map((word) => make("th", word ? { scope: "col" } : { "aria-label": "compared" }, word));
  return make("div", { class: "runs-box", tabindex: 0, role: "region", "aria-label": "Sampled ids beside the ids of the text" },
    make("table", { class: "runs" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}
