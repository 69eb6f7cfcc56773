// The box to try a prompt: the form, the call of /generate/ and the order of what comes back.

import { call } from "./api.js";
import { byId, make, setText } from "./dom.js";
import { showAnswer } from "./answer.js";

const TIMEOUT_MS = 300_000;
const HELP = {
  text: "The server tokenizes it once.",
  ids: "A JSON list such as [9707, 11, 1879]. The engine gets these ids.",
};
const EXAMPLES = { text: "Hello, world", ids: "" };

let running = null;

/** `needKey` is called when the server asks for a key. */
export function preparePrompt(needKey) {
  const form = byId("prompt-form");
  const drafts = { ...EXAMPLES };
  let kind = form.elements.kind.value;
  form.addEventListener("change", () => {
    const chosen = form.elements.kind.value;
    if (chosen === kind) return;
    drafts[kind] = byId("prompt").value;
    byId("prompt").value = drafts[chosen];
    kind = chosen;
    setText(byId("prompt-help"), HELP[kind]);
    showError("");
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) generate(form, needKey);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  byId("cancel").addEventListener("click", () => running?.abort());
}

async function generate(form, needKey) {
  showError("");
  let body;
  try {
    body = bodyOf(form);
  } catch (error) {
    showError(error.message);
    byId("prompt").focus();
    return;
  }
  running = new AbortController();
  setBusy(true);
  const began = performance.now();
  try {
    const answer = await call("generate/", { body, timeoutMs: TIMEOUT_MS, signal: running.signal });
    const seconds = (performance.now() - began) / 1000;
    await showAnswer(byId("result"), answer, seconds, running.signal);
  } catch (error) {
    if (error.status === 401) needKey();
    showError(error.requestId ? `${error.message} (request ${error.requestId})` : error.message);
    byId("result").replaceChildren(make("p", { class: "empty" }, "No answer."));
  } finally {
    running = null;
    setBusy(false);
  }
}

function bodyOf(form) {
  const text = byId("prompt").value;
  const prompt = form.elements.kind.value === "ids" ? idsOf(text) : text;
  const body = { prompts: [prompt], logprobs: 0, max_tokens: numberOf("max-tokens", 32), temperature: numberOf("temperature", 1) };
  if (byId("seed").value !== "") body.generation_kwargs = { seed: numberOf("seed", 0) };
  return body;
}

function idsOf(text) {
  const expected = "Expected a JSON list of token ids, such as [9707, 11, 1879]";
  let ids;
  try {
    ids = JSON.parse(text);
  } catch {
    throw new Error(`${expected}; this is no JSON.`);
  }
  if (!Array.isArray(ids)) throw new Error(`${expected}; this is no list.`);
  const place = ids.findIndex((id) => !Number.isSafeInteger(id) || id < 0);
  if (place >= 0) throw new Error(`${expected}; got ${JSON.stringify(ids[place])} at place ${place}.`);
  if (!ids.length) throw new Error(`${expected}; this one is empty.`);
  return ids;
}

/** The server checks ranges, and its message names the field. */
function numberOf(id, otherwise) {
  const value = byId(id).valueAsNumber;
  return Number.isNaN(value) ? otherwise : value;
}

function setBusy(isBusy) {
  byId("generate").disabled = isBusy;
  setText(byId("generate"), isBusy ? "Generating …" : "Generate");
  byId("cancel").hidden = !isBusy;
  byId("result").setAttribute("aria-busy", String(isBusy));
}

function showError(text) {
  setText(byId("prompt-error"), text);
  byId("prompt").setAttribute("aria-invalid", text ? "true" : "false");
}
