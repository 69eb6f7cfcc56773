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
// Errors are rare: one bar for each ten seconds.
const BIN_S = 10;

/** Requests with an error in each bin, by code; `tops` are where the bars end, one on the other. */
function errorSeries(history) {
  if (!history.countsErrors) return [];
  const sums = Object.entries(history.errors)
    .map(([label, values]) => ({ label, values: binned(history, values) }))
    .filter(({ values }) => values.some((value) => value > 0))
    .sort((one, other) => one.label.localeCompare(other.label));
  const rest = sums.splice(MAX_CODES);
  if (rest.length) sums.push({ label: "other", values: sums[0].values.map((_, index) => rest.reduce((sum, { values }) => sum + values[index], 0)) });
  let below = binTimes(history.time).map(() => 0);
  for (const one of sums) below = one.tops = one.values.map((value, index) => value + below[index]);
  return sums;
}

const binOf = (time) => Math.floor(time / BIN_S) * BIN_S;

function binTimes(times) {
  return [...new Set(times.map(binOf))];
}

/** Rates, one for each interval, as numbers of each bin. */
function binned({ time: times, interval }, rates) {
  const numbers = new Map(binTimes(times).map((time) => [time, 0]));
  times.forEach((time, index) => numbers.set(binOf(time), numbers.get(binOf(time)) + interval * (rates[index] ?? 0)));
  return [...numbers.values()].map(Math.round);
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
    title: "Errors", unit: "requests in 10 s, by code", show: format.number, bars: true, isStacked: true,
    none: NOT_REPORTED, noneOf: "No error in the last minutes.",
    isReported: (history) => history.countsErrors,
    times: (history) => binTimes(history.time),
    series: errorSeries,
  },
  ofFigures("Prefix cache", "prompt tokens found", format.percent, NOT_REPORTED, [
    ["cache_hits", "hits"],
  ], { max: 1, noneOf: "No prompt in the last minutes." }),
];
