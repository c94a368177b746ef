// The chart of each algorithm's distance to the solution, on a logarithmic scale.
import { el } from "../dom.js";
import { colour, DASHES, plot } from "../plot.js";

const HEIGHT = 210;
/** The smallest drawn value. Smaller ones are rounding errors. */
const FLOOR = 1e-16;

export class Chart {
  /** `jump(step)` is called if the chart is clicked. */
  constructor(jump) {
    Object.assign(this, { field: "error", drawn: [[], 0], plot: null, shape: "" });
    this.node = el("div", { class: "chart", role: "img" });
    this.legend = el("ul", { class: "legend" });
    new ResizeObserver(() => this.draw(...this.drawn)).observe(this.node);
    this.node.addEventListener("pointerdown", (event) => {
      if (!this.plot) return;
      const step = Math.round(this.plot.posToVal(event.clientX - this.plot.over.getBoundingClientRect().left, "x"));
      jump(Math.max(0, Math.min(this.steps, step)));
    });
  }

  /** `series` is [{title, frames, endless, colour}]. An endless playback is shown up to a few steps after `at`. */
  draw(series, at) {
    this.drawn = [series, at];
    const width = this.node.clientWidth, stretch = Math.max(50, Math.ceil(at / 50 + 0.5) * 50);
    const shown = series
      .map((one) => ({ ...one, frames: one.endless ? one.frames.slice(0, stretch + 1) : one.frames }))
      .filter((one) => one.frames.length > 0);
    if (shown.length === 0 || width === 0) return;
    this.steps = Math.max(10, ...shown.map((one) => one.frames.length - 1));
    const shape = shown.map((one) => one.colour).join();
    if (shape !== this.shape) this.plot = this.plot?.destroy() ?? null;
    this.shape = shape;
    this.plot ??= this.made(shown);
    const steps = Array.from({ length: this.steps + 1 }, (_, step) => step);
    // the first frame is the start, so it has no change
    const y = (frame) => (this.field === "residual" && frame.index === 0 ? undefined : Math.max(FLOOR, frame[this.field]));
    this.plot.batch(() => {
      this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData([steps, ...shown.map((one) => steps.map((step) => one.frames[step] && y(one.frames[step])))]);
    });
    this.plot.setCursor({ left: this.plot.valToPos(Math.min(at, this.steps), "x"), top: 0 }, false);
    this.tell(shown, at);
  }

  made(shown) {
    const lines = shown.map((one) => {
      const stroke = () => colour(`--c${one.colour}`);
      return { stroke, width: 2, dash: DASHES[one.colour], points: { show: false, fill: stroke } };
    });
    const ignore = () => null;
    return plot(this.node, HEIGHT, {
      series: [{}, ...lines],
      x: { text: String, range: () => [0, this.steps] },
      y: { text: power, range: (_, low, high) => decades(low, high), log: true },
      cursor: {
        y: false,
        points: { show: () => el("div", { class: "hover-point" }) },
        bind: { mousedown: ignore, mouseup: ignore, mousemove: ignore, mouseenter: ignore, mouseleave: ignore, dblclick: ignore },
      },
    });
  }

  tell(shown, at) {
    const values = shown.map((one) => `${one.title}: ${number(one.frames[Math.min(at, one.frames.length - 1)][this.field])}`);
    this.node.setAttribute("aria-label", `${this.field === "error" ? "Largest error of a value" : "Largest change in a step"} by step. At step ${at}: ${values.join("; ")}.`);
    this.legend.replaceChildren(...shown.map((one) => el("li", {}, el("span", { class: `key c${one.colour}` }), one.title)));
  }
}

/** Return the powers of ten that enclose the values, at least one decade apart. */
function decades(low, high) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return [0.1, 1];
  const top = Math.ceil(Math.log10(Math.max(high, 1e-2))), bottom = Math.floor(Math.log10(low));
  return [10 ** Math.min(bottom, top - 1), 10 ** top];
}

/** Return a number as text, such as 1.2·10⁻³. */
export function number(value) {
  if (value === 0) return "0";
  if (value >= 0.001 && value < 10_000) return String(Number(value.toPrecision(3)));
  const [mantissa, exponent] = value.toExponential(1).split("e");
  return `${mantissa}·10${superscript(Number(exponent))}`;
}

const power = (value) => (value === 1 ? "1" : `10${superscript(Math.round(Math.log10(value)))}`);
const superscript = (n) => String(n).replace("-", "⁻").replace(/[0-9]/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
