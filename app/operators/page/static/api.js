// Calls of the server that has sent this page; no other host is ever asked.

import { currentKey } from "./key.js";

/** An answer that is no success, or no answer at all (status 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", requestId = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.requestId = requestId;
  }
}

/**
 * The JSON of an answer.
 * @param {string} path relative to the page, so that a proxy may serve it below a prefix
 * @param {{body?: object, timeoutMs?: number, signal?: AbortSignal}} options
 */
export async function call(path, { body, timeoutMs = 8000, signal } = {}) {
  const headers = {};
  const key = currentKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const signals = [AbortSignal.timeout(timeoutMs), ...(signal ? [signal] : [])];
  let response, text;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal: AbortSignal.any(signals),
      cache: "no-store",
    });
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw new ApiError("Cancelled.", { code: "cancelled" });
    if (error.name === "TimeoutError") throw new ApiError(`No answer within ${timeoutMs / 1000} s.`);
    throw new ApiError("The server does not answer.");
  }
  return read(response, text);
}

function read(response, text) {
  const details = { status: response.status, requestId: response.headers.get("X-Request-Id") ?? "" };
  let answer;
  try {
    answer = JSON.parse(text);
  } catch {
    throw new ApiError(`Expected JSON, got status ${response.status}: ${text.slice(0, 200)}`, details);
  }
  if (response.ok) {
    return { ...answer, release: response.headers.get("X-Titopool-Version") };
  }
  const error = answer.error ?? {};
  throw new ApiError(error.message ?? `Status ${response.status}`, { ...details, code: error.code ?? "" });
}
