// One chart: a card with a legend whose values follow the cursor, drawn by uPlot.

import { byId, make, setText } from "./dom.js";
import { timeOfDay } from "./format.js";

const HEIGHT = 150;
const LEAST_SPAN_S = 120;
const COLORS = 6;
const DASH = [6, 4];

export class Chart {
  #plot = null;
  #labels = null;
  #series = [];
  #history = null;
  #times = [];
  #values = [];

  /** `kind` is one of series.js. */
  constructor(kind, parent) {
    this.kind = kind;
    this.time = make("time");
    this.legend = make("ul", { class: "legend" });
    this.box = make("div", { class: "plot" });
    this.none = make("p", { class: "none" }, "No data yet.");
    this.root = make("section", { class: "card chart", tabindex: 0, role: "group", "aria-roledescription": "chart" },
      make("div", { class: "chart-head" }, make("h3", {}, kind.title), make("span", { class: "unit" }, kind.unit), this.time),
      this.legend, this.box, this.none);
    parent.append(this.root);
    this.root.addEventListener("keydown", (event) => this.#onKey(event));
    this.root.addEventListener("blur", () => this.#plot?.setCursor({ left: -10, top: -10 }));
    // An empty chart is hidden and has no width.
    new ResizeObserver(() => this.box.clientWidth && this.#plot?.setSize({ width: this.box.clientWidth, height: HEIGHT })).observe(this.box);
  }

  update(history) {
    this.#history = history;
    this.#times = this.kind.times?.(history) ?? history.time;
    this.#series = this.kind.series(history);
    const hasPoints = this.#series.some(({ values }) => values.some((value) => value !== null));
    const isReported = this.kind.isReported?.(history) ?? this.#series.length > 0;
    this.none.hidden = hasPoints;
    this.root.classList.toggle("empty", !hasPoints);
    setText(this.none, history.time.length < 2 ? "No data yet." : (isReported && this.kind.noneOf) || this.kind.none);
    // uPlot needs a series; this one has no point.
    const shown = this.#series.length ? this.#inOrder() : [{ label: "", values: this.#times.map(() => null) }];
    const labels = shown.map(({ label }) => label).join("\n");
    if (labels !== this.#labels) this.#draw(shown, labels);
    this.#plot.setData([this.#times, ...shown.map(({ values, tops }) => tops ?? values)]);
    const first = Math.max(history.now - history.span, Math.min(history.time[0] ?? history.now, history.now - LEAST_SPAN_S));
    this.#plot.setScale("x", { min: first, max: history.now });
    this.#showValues(this.#plot.cursor.idx);
  }

  /** Draws again with the colours of now: the user has changed to dark or light. */
  redraw() {
    this.#labels = null;
    if (this.#history) this.update(this.#history);
  }

  /** Stacked bars are drawn from the highest to the lowest, each in front of the one before. */
  #inOrder() {
    return this.kind.isStacked ? this.#series.toReversed() : this.#series;
  }

  #draw(shown, labels) {
    this.#labels = labels;
    this.#plot?.destroy();
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    this.#values = this.#series.map(() => make("b"));
    this.legend.replaceChildren(...this.#series.map(({ label }, index) =>
      make("li", {}, make("span", { class: `swatch s${1 + (index % COLORS)}${this.#isDashed(index) ? " dashed" : ""}` }), label, this.#values[index])));
    const axis = {
      stroke: color("--muted"), font: "11px system-ui, sans-serif",
      grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false },
    };
    this.#plot = new uPlot({
      width: this.box.clientWidth || 300, height: HEIGHT, legend: { show: false }, padding: [8, 14, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "charts" }, points: { size: 7 } },
      scales: { x: { time: true }, y: { range: (_, __, most) => [0, this.kind.max ?? niceMost(most)] } },
      axes: [
        { ...axis, size: 26, space: 56, values: (_, times) => times.map((time) => timeOfDay(time).slice(0, time % 60 ? 8 : 5)) },
        { ...axis, size: 54, space: 34, gap: 4, values: (_, values) => values.map(this.kind.show) },
      ],
      series: [{}, ...shown.map((one) => {
        const index = Math.max(0, this.#series.indexOf(one));
        return this.#line(one, index, color(`--series-${1 + (index % COLORS)}`));
      })],
      hooks: { setCursor: [(plot) => this.#showValues(plot.cursor.idx)] },
    }, [[], ...shown.map(() => [])], this.box);
  }

  #isDashed(index) {
    return index % 2 === 1 && !this.kind.bars;
  }

  #line({ label }, index, stroke) {
    // The second of two bars stands in front of the first.
    const size = this.kind.isStacked ? [0.8, 16, 2] : index ? [1, 4, 4] : [1, 10, 10];
    const paths = this.kind.bars ? uPlot.paths.bars({ size, align: this.kind.isStacked ? 1 : 0 }) : undefined;
    return {
      label, stroke, paths, width: this.kind.bars ? 0 : 1.75,
      dash: this.#isDashed(index) ? DASH : undefined,
      fill: this.kind.bars ? stroke : index ? undefined : `${stroke}1f`,
      points: { show: false }, spanGaps: false,
    };
  }

  /** The values under the cursor, or the newest ones. */
  #showValues(index) {
    const times = this.#times;
    const isAtCursor = index !== null && index !== undefined && index < times.length;
    setText(this.time, isAtCursor ? timeOfDay(times[index]) : "");
    this.#series.forEach(({ values }, number) => {
      const value = isAtCursor ? values[index] : this.kind.bars && !this.kind.isStacked ? values.findLast((one) => one !== null) : values.at(-1);
      if (this.#values[number]) setText(this.#values[number], this.kind.show(value ?? null));
    });
    const words = this.#series.map(({ label }, number) => `${label} ${this.#values[number]?.textContent}`);
    this.root.setAttribute("aria-label", `${this.kind.title}, ${this.kind.unit}: ${words.join(", ") || this.none.textContent}`);
  }

  #onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -15, PageDown: 15, Home: -Infinity, End: Infinity }[event.key];
    const times = this.#times;
    if (step === undefined || !times.length) return;
    event.preventDefault();
    const from = this.#plot.cursor.idx ?? times.length - 1;
    const index = Math.max(0, Math.min(times.length - 1, from + step));
    this.#plot.setCursor({ left: this.#plot.valToPos(times[index], "x"), top: 10 });
    setText(byId("cursor"), `${timeOfDay(times[index])}: ${this.root.getAttribute("aria-label")}`);
  }
}

/** A little room above the highest value; an empty chart has a scale, too. */
function niceMost(most) {
  return most ? 1.1 * most : 1;
}
