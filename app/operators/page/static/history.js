// The samples of the last minutes: what the server kept, and what was added since.

// After so many intervals without a sample the line is broken.
const GAP = 4;

export class History {
  constructor() {
    this.time = [];
    this.figures = {};
    this.errors = {};
    this.countsErrors = false;
    this.now = 0;
    this.span = 600;
    this.interval = 2;
  }

  get last() {
    return this.time.at(-1) ?? 0;
  }

  /** Adds an answer of GET /metrics/history; answers of several front ends may overlap. */
  add(answer) {
    this.now = answer.now;
    this.span = answer.span_s;
    this.interval = answer.interval_s;
    this.countsErrors = answer.errors_per_s !== null;
    answer.time_s.forEach((time, index) => {
      // The server's clock was set back.
      if (time < this.last - this.span) this.#cut(Infinity);
      if (time <= this.last) return;
      if (this.time.length && time - this.last > GAP * answer.interval_s) this.#push(this.last + answer.interval_s, () => null);
      const of = (columns) => (name) => columns?.[name]?.[index] ?? null;
      for (const name of Object.keys(answer.figures)) this.figures[name] ??= this.time.map(() => null);
      for (const code of Object.keys(answer.errors_per_s ?? {})) this.errors[code] ??= this.time.map(() => 0);
      this.#push(time, of(answer.figures), (code) => of(answer.errors_per_s)(code) ?? 0);
    });
    this.#cut(answer.now - answer.span_s);
  }

  /** The newest value of a figure, or null. */
  latest(name) {
    return this.figures[name]?.at(-1) ?? null;
  }

  /** The newest value of a figure that is not null: of the last `seconds`. */
  recent(name, seconds) {
    const values = this.figures[name] ?? [];
    for (let index = values.length - 1; index >= 0 && this.time[index] > this.now - seconds; index--) {
      if (values[index] !== null) return values[index];
    }
    return null;
  }

  /** How many requests ended with an error in the last `seconds`; null if nobody counts them. */
  numErrors(seconds) {
    if (!this.countsErrors) return null;
    const first = this.time.findIndex((time) => time > this.now - seconds);
    if (first < 0) return 0;
    const sums = Object.values(this.errors).map((values) => values.slice(first).reduce((sum, value) => sum + (value ?? 0), 0));
    return Math.round(sums.reduce((sum, value) => sum + value, 0) * this.interval);
  }

  #push(time, figure, error = figure) {
    this.time.push(time);
    for (const [name, values] of Object.entries(this.figures)) values.push(figure(name));
    for (const [code, values] of Object.entries(this.errors)) values.push(error(code));
  }

  #cut(before) {
    const first = this.time.findIndex((time) => time >= before);
    const number = first < 0 ? this.time.length : first;
    for (const values of [this.time, ...Object.values(this.figures), ...Object.values(this.errors)]) values.splice(0, number);
  }
}
