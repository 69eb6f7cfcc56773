// An answer of /generate/: facts, tokens with text and log-probabilities, and re-tokenization.

import { call } from "./api.js";
import { make } from "./dom.js";
import * as format from "./format.js";
import { compare, runsTable } from "./retokenized.js";
import { scale, tokenList } from "./tokens.js";

/**
 * Fills `parent`. Without a tokenizer the ids and log-probabilities are shown alone.
 * @param {object} answer to one prompt with one completion
 * @param {number} seconds that it took
 */
export async function showAnswer(parent, answer, seconds, signal) {
  const [promptIds] = answer.prompt_ids;
  const [ids] = answer.completion_ids;
  const logprobs = answer.logprobs[0].map(([value]) => value);
  const texts = await textsOf([promptIds, ids], signal);
  const again = texts.error || !ids.length ? null : await tokenizedAgain(texts.whole[1], signal);
  const detail = make("p", { class: "detail", id: "token-detail", "aria-live": "polite" }, "Choose a token for its figures: click it, or use ← →.");
  parent.replaceChildren(
    factsOf(answer, ids, logprobs, seconds),
    make("h3", {}, `Completion, ${countOf(ids)}`),
    tokenList(ids, texts.pieces[1], logprobs, detail),
    detail,
    scale(),
    ...retokenized(ids, texts, again),
    make("h3", {}, `Prompt, ${countOf(promptIds)}`),
    tokenList(promptIds, texts.pieces[0]),
  );
}

const countOf = (ids) => (ids.length === 1 ? "1 token" : `${format.number(ids.length)} tokens`);

function factsOf(answer, ids, logprobs, seconds) {
  const finite = logprobs.filter((value) => value !== null);
  const mean = finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : undefined;
  const versions = answer.weight_versions[0].map(([version]) => version).join(" → ");
  const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
  return make("p", { class: "facts" },
    fact("ended by", answer.finish_reasons[0]),
    fact("took", format.duration(seconds)),
    fact("weights", versions || "–"),
    fact("mean log-probability", mean === undefined ? "–" : format.logprob(mean)),
    fact("prompt tokens from the cache", format.number(answer.num_cached_tokens[0])));
}

/** Of each list of ids the whole text and the piece of each id; or an error. */
async function textsOf(lists, signal) {
  try {
    const answers = await Promise.all(lists.map((tokens) =>
      tokens.length ? call("detokenize", { body: { tokens, return_token_texts: true }, signal }) : { prompt: "", token_texts: [] }));
    return { whole: answers.map((one) => one.prompt), pieces: answers.map((one) => one.token_texts), error: "" };
  } catch (error) {
    return { whole: [], pieces: [null, null], error: error.message };
  }
}

/** The ids and words that the text of a completion is tokenized to; an error says why not. */
async function tokenizedAgain(text, signal) {
  try {
    const { tokens } = await call("tokenize", { body: { prompt: text, add_special_tokens: false }, signal });
    return { ids: tokens, error: "" };
  } catch (error) {
    return { ids: [], error: error.message };
  }
}

function retokenized(ids, texts, again) {
  if (!ids.length) return [];
  const error = texts.error || again.error;
  const title = make("h3", {}, "Tokenizing this text again");
  if (error) return [title, make("p", { class: "help", id: "verdict" }, `Ids only, without text: ${error}`)];
  const runs = compare(ids, again.ids);
  const numPlaces = runs.filter((run) => !run.isSame).length;
  const verdict = numPlaces
    ? `${countOf(ids)} were sampled; their text gives ${countOf(again.ids)} and differs at ${numPlaces === 1 ? "1 place" : `${numPlaces} places`}. Train on the sampled ids.`
    : "The same ids: here nothing would change.";
  return [title, make("p", { class: "verdict", id: "verdict" }, verdict), ...(numPlaces ? [runsTable(runs, texts.pieces[1])] : [])];
}
