// The table of workers.

import { byId, make } from "./dom.js";
import * as format from "./format.js";

const GOOD = new Set(["ready"]);
const BAD = new Set(["unreachable", "mismatched", "stale"]);

/**
 * @param {object[]} workers of GET /workers
 * @param {Object<string, number>} tokensPerS by worker
 */
export function showWorkers(workers, tokensPerS) {
  const rows = workers.map((worker) => rowOf(worker, tokensPerS[worker.worker]));
  if (!rows.length) {
    rows.push(make("tr", { class: "empty" }, make("td", { colspan: 9 }, "The pool has no worker yet.")));
  }
  byId("workers").tBodies[0].replaceChildren(...rows);
}

function rowOf(worker, tokensPerS) {
  const isServing = worker.phase === "ready";
  return make("tr", { "data-worker": worker.worker ?? worker.endpoint },
    make("th", { scope: "row", class: "name" }, worker.worker ?? "–", make("small", { title: worker.endpoint }, format.baseName(worker.endpoint))),
    cell("", "state", phaseOf(worker), make("small", {}, sinceOf(worker))),
    cell("Model", "", modelOf(worker)),
    cell("Weights", "number", weightsOf(worker)),
    cell("Load", "", loadOf(worker)),
    cell("Tokens/s", "number", format.number(isServing ? tokensPerS ?? 0 : null)),
    cell("Cache hits", "number", hitsOf(worker)),
    cell("Jobs", "number", ...jobsOf(worker)),
    cell("Last end", "end", ...endOf(worker)),
  );
}

function cell(label, kind, ...children) {
  return make("td", { class: kind || null, "data-label": label || null }, ...children);
}

function phaseOf(worker) {
  const kind = GOOD.has(worker.phase) ? "good" : BAD.has(worker.phase) ? "bad" : "wait";
  return make("span", { class: "phase", "data-kind": kind }, worker.phase.replaceAll("_", " "));
}

function sinceOf(worker) {
  if (worker.phase === "unreachable") return worker.reason ?? `silent for ${format.age(worker.silent_s)}`;
  return worker.reason ?? `for ${format.age(worker.phase_s)}`;
}

function modelOf(worker) {
  if (!worker.model) return "–";
  const engine = [worker.dtype, worker.vllm_version && `vLLM ${worker.vllm_version}`].filter(Boolean).join(", ");
  return make("div", { title: worker.model },
    make("div", { class: "clip" }, format.baseName(worker.model)), make("small", {}, engine));
}

function weightsOf(worker) {
  if (worker.weight_version === undefined) return "–";
  const { weight_version: version, weight_label: label } = worker;
  return make("span", {}, String(version), label === String(version) ? null : make("small", {}, label));
}

function loadOf(worker) {
  if (!worker.num_slots) return "–";
  const text = `${format.number(worker.num_sequences)} / ${format.number(worker.num_slots)}`;
  const bar = make("meter", { min: 0, max: worker.num_slots, value: Math.min(worker.num_sequences, worker.num_slots), "aria-label": "Completions in flight, of the engine's slots" });
  return make("div", { class: "load" }, bar, make("span", {}, text));
}

function hitsOf(worker) {
  return worker.num_prompt_tokens ? format.percent(worker.num_cached_tokens / worker.num_prompt_tokens) : "–";
}

function jobsOf(worker) {
  if (worker.num_completed_jobs === undefined) return ["–"];
  const failed = worker.num_failed_jobs ? `${format.number(worker.num_failed_jobs)} failed` : "";
  return [format.number(worker.num_completed_jobs), make("small", {}, failed)];
}

function endOf(worker) {
  const end = worker.last_end;
  if (!end) return ["none seen"];
  return [`${format.age(end.ago_s)} ago`, make("small", { title: format.moment(end.ended_at) }, end.reason)];
}
