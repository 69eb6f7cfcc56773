// Asks the server every two seconds while the page is visible, and shows what it says.

import { ApiError, call } from "./api.js";
import { Chart } from "./chart.js";
import { byId, setText } from "./dom.js";
import { timeOfDay } from "./format.js";
import { History } from "./history.js";
import { askForKey, currentKey, prepareKeyDialog } from "./key.js";
import { preparePrompt } from "./prompt.js";
import { CHARTS } from "./series.js";
import { showSummary } from "./summary.js";
import { showWorkers } from "./workers.js";

const INTERVAL_MS = 2000;

const history = new History();
const charts = CHARTS.map((kind) => new Chart(kind, byId("charts")));
let timer = 0;
let lostSince = null;

async function poll() {
  clearTimeout(timer);
  const key = currentKey();
  try {
    const [overview, samples] = await Promise.all([call("workers"), call(`metrics/history?since=${history.last}`)]);
    show(overview, samples);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) {
      needKey(Boolean(key));
      return;
    }
    showLoss(error);
  }
  if (document.hidden) return;
  clearTimeout(timer);
  timer = setTimeout(poll, INTERVAL_MS);
}

function show(overview, samples) {
  lostSince = null;
  history.add(samples);
  showSummary(overview.workers, history);
  showWorkers(overview.workers, samples.worker_tokens_per_s);
  for (const chart of charts) chart.update(history);
  byId("change-key").hidden = !currentKey();
  setText(byId("release"), `titopool ${overview.release}.`);
  setLive("on", overview.draining ? "Ending: finishes what is open" : "Live");
  byId("problem").hidden = true;
}

/** What is on the page stays, marked as old. */
function showLoss(error) {
  lostSince ??= Date.now() / 1000;
  const since = timeOfDay(lostSince);
  setLive("off", error.status ? `Error since ${since}` : `Server unreachable since ${since}`);
  byId("problem").hidden = !error.status;
  setText(byId("problem"), error.status ? `The server answers ${error.status}: ${error.message}` : "");
}

function needKey(hadKey) {
  setLive("off", "No access");
  byId("change-key").hidden = false;
  askForKey(hadKey ? "The server does not know this key. Check it, or ask the server's operator." : "");
}

function setLive(state, text) {
  byId("live").dataset.state = state;
  setText(byId("live-text"), text);
  for (const id of ["summary", "workers", "charts"]) byId(id).classList.toggle("old", state === "off");
}

prepareKeyDialog(poll, () => {
  setText(byId("problem"), "This server shows its figures to those who have a key. “Change key” asks again.");
  byId("problem").hidden = byId("live").dataset.state === "on";
});
preparePrompt(() => needKey(Boolean(currentKey())));
document.addEventListener("visibilitychange", () => document.hidden || poll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
poll();
