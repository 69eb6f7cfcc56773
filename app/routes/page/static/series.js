// Which charts there are: their figures, units and words. Drawn by chart.js.

import * as format from "./format.js";

const NOT_REPORTED = "No data yet: this server does not report it.";

/** A chart of figures of the history. `lines` are [figure, label]. */
function ofFigures(title, unit, show, none, lines, options = {}) {
  return {
    title, unit, show, none,
    series: (history) =>
      lines
        .filter(([figure]) => history.figures[figure])
        .map(([figure, label]) => ({ label, values: history.figures[figure] })),
    ...options,
  };
}

// More codes than this are summed up.
const MAX_CODES = 5;

function errorSeries(history) {
  if (!history.countsErrors) return [];
  const total = ([, values]) => values.reduce((sum, value) => sum + (value ?? 0), 0);
  const codes = Object.entries(history.errors).filter((entry) => total(entry) > 0).sort();
  const shown = codes.slice(0, MAX_CODES).map(([label, values]) => ({ label, values }));
  const rest = codes.slice(MAX_CODES).map(([, values]) => values);
  if (rest.length) {
    shown.push({ label: "other", values: history.time.map((_, index) => rest.reduce((sum, values) => sum + (values[index] ?? 0), 0)) });
  }
  return shown;
}

export const CHARTS = [
  ofFigures("Tokens", "a second", format.number, NOT_REPORTED, [
    ["completion_tokens_per_s", "generated"],
    ["prompt_tokens_per_s", "of prompts"],
  ]),
  ofFigures("Requests", "completions and prompts", format.number, NOT_REPORTED, [
    ["running", "in flight"],
    ["waiting", "queued"],
  ]),
  ofFigures("Time to first token", "last 10 s", format.duration, NOT_REPORTED, [
    ["first_token_p50_s", "median"],
    ["first_token_p95_s", "95th percentile"],
  ], { noneOf: "No request in the last minutes." }),
  ofFigures("Weight updates", "of each update", format.duration, NOT_REPORTED, [
    ["update_s", "until served"],
    ["paused_s", "paused"],
  ], { bars: true, noneOf: "No weight update in the last minutes." }),
  {
    title: "Errors", unit: "requests a second", show: format.number, steps: true,
    none: NOT_REPORTED, noneOf: "No error in the last minutes.",
    isReported: (history) => history.countsErrors,
    series: errorSeries,
  },
  ofFigures("Prefix cache", "prompt tokens found", format.percent, NOT_REPORTED, [
    ["cache_hits", "hits"],
  ], { max: 1, noneOf: "No prompt in the last minutes." }),
];
