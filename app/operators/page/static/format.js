// Numbers, durations and times as the page writes them.

const NONE = "–";
const MINUS = "−";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

const isNone = (value) => value === null || value === undefined || Number.isNaN(value);

/** A count or a rate: 7, 1,234, 56.7K; below ten, one more digit if `value` has one. */
export function number(value) {
  if (isNone(value)) return NONE;
  if (value >= 10_000) return short.format(value);
  if (value < 10 && !Number.isInteger(value)) return value.toFixed(value < 1 ? 2 : 1);
  return whole.format(value);
}

/** A share of 1 as percent. */
export function percent(value) {
  return isNone(value) ? NONE : `${whole.format(100 * value)}\u202f%`;
}

/** Seconds as µs, ms, s, min, h or days. */
export function duration(seconds) {
  if (isNone(seconds)) return NONE;
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(seconds < 9.95 ? 2 : 1)} s`;
  return age(seconds);
}

/** Seconds as one coarse unit. */
export function age(seconds) {
  if (isNone(seconds)) return NONE;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

/** A Unix time of today as hours, minutes and seconds. */
export function timeOfDay(unixSeconds) {
  return clock.format(new Date(unixSeconds * 1000));
}

/** A Unix time with its day. */
export function moment(unixSeconds) {
  return day.format(new Date(unixSeconds * 1000));
}

/** A log-probability; null is one that was not finite. */
export function logprob(value) {
  if (value === null || value === undefined) return `${MINUS}∞`;
  return value.toFixed(3).replace("-", MINUS);
}

/** The last part of a path or of a name on a hub. */
export function baseName(path) {
  return path.replace(/\/+$/, "").split("/").pop() || path;
}
