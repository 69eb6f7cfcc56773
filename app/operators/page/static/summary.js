// The six figures at the top, and the model.

import { byId, make, setText } from "./dom.js";
import * as format from "./format.js";

export function showSummary(workers, history) {
  const numReady = workers.filter((worker) => worker.phase === "ready").length;
  const numSlots = workers.reduce((sum, worker) => sum + (worker.phase === "ready" ? worker.num_slots : 0), 0);
  const numErrors = history.numErrors(60);
  show("sum-workers", String(numReady), `of ${workers.length}`, numReady < workers.length);
  show("sum-tokens", format.number(history.latest("completion_tokens_per_s")), "tokens/s");
  show("sum-running", format.number(history.latest("running")), numSlots ? `of ${format.number(numSlots)} slots` : "");
  show("sum-waiting", format.number(history.latest("waiting")), "prompts");
  show("sum-first", format.duration(history.recent("first_token_p50_s", 60)), "");
  show("sum-errors", format.number(numErrors), numErrors === null ? "no data yet" : "", numErrors > 0);
  showModel(workers);
}

function show(id, value, unit, isBad = false) {
  const element = byId(id);
  element.className = isBad ? "bad" : "";
  if (element.textContent !== value + unit) element.replaceChildren(value, unit ? make("small", {}, unit) : "");
}

function showModel(workers) {
  const model = workers.find((worker) => worker.model)?.model;
  byId("model").hidden = !model;
  if (!model) return;
  setText(byId("model"), format.baseName(model));
  byId("model").title = model;
  document.title = `${format.baseName(model)} · titopool`;
}
