// How each algorithm comes nearer, on a logarithmic scale: hand-made SVG, drawn again at every change.
import { el, svg } from "../dom.js";

const HEIGHT = 210, LEFT = 46, RIGHT = 14, TOP = 12, BOTTOM = 28;
const FLOOR = 1e-10;
const DASHES = ["", "7 4", "2 4", "9 3 2 3"];

export class Chart {
  constructor(jump) {
    this.field = "error";
    this.width = 640;
    this.drawn = [[], 0];
    this.node = svg("svg", { class: "chart", role: "img" });
    new ResizeObserver(() => this.draw(...this.drawn)).observe(this.node);
    this.legend = el("ul", { class: "legend" });
    this.node.addEventListener("pointerdown", (event) => {
      const box = this.node.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.width;
      jump(Math.round(Math.max(0, Math.min(1, (x - LEFT) / (this.width - LEFT - RIGHT))) * this.steps));
    });
  }

  /** `series` is [{title, frames, endless, at, colour}]; of films that go on and on, a stretch beyond `at` is shown. */
  draw(series, at) {
    this.drawn = [series, at];
    this.width = Math.max(260, this.node.clientWidth || 640);
    this.node.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const stretch = Math.max(50, Math.ceil(at / 50 + 0.5) * 50);
    const shown = series
      .map((one) => ({ ...one, frames: one.endless ? one.frames.slice(0, stretch + 1) : one.frames }))
      .filter((one) => one.frames.length > 0);
    this.steps = Math.max(10, ...shown.map((one) => one.frames.length - 1));
    const values = shown.flatMap((one) => one.frames.slice(1).map((frame) => frame[this.field])).filter((v) => v > FLOOR);
    const high = Math.ceil(Math.log10(Math.max(1e-2, ...values))), low = Math.max(-10, Math.floor(Math.log10(Math.min(high < 1 ? 0.1 : 1, ...values))));
    const x = (step) => LEFT + (step / this.steps) * (this.width - LEFT - RIGHT);
    const y = (value) => TOP + ((high - Math.log10(Math.max(value, 10 ** low))) / Math.max(1, high - low)) * (HEIGHT - TOP - BOTTOM);
    this.node.replaceChildren(...axes(x, y, this.steps, low, high, this.width), cursor(x(Math.min(at, this.steps))));
    shown.forEach((one) => this.node.append(...curve(one, this.field, x, y)));
    if (shown.length === 0) return;
    const said = shown.map((one) => `${one.title}: ${number(one.frames[Math.min(at, one.frames.length - 1)][this.field])}`).join("; ");
    this.node.setAttribute("aria-label", `${this.field === "error" ? "Error to the exact values" : "Change in a step"} by step. At step ${at}: ${said}.`);
    this.legend.replaceChildren(...shown.map(key));
  }
}

/** 1.2e-3 as people write it. */
export function number(value) {
  if (value === 0) return "0";
  if (value >= 0.001 && value < 10_000) return String(Number(value.toPrecision(3)));
  const [mantissa, exponent] = value.toExponential(1).split("e");
  return `${mantissa}·10${superscript(Number(exponent))}`;
}

const superscript = (n) => String(n).replace("-", "⁻").replace(/[0-9]/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);

function axes(x, y, steps, low, high, width) {
  const nodes = [];
  const each = Math.max(1, Math.ceil((high - low) / 5));
  for (let power = high; power >= low; power -= each) {
    const at = y(10 ** power);
    nodes.push(svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    nodes.push(svg("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, power === 0 ? "1" : `10${superscript(power)}`));
  }
  const stride = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((s) => steps / s <= width / 70) ?? 2000;
  for (let step = 0; step <= steps; step += stride) {
    nodes.push(svg("text", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, String(step)));
  }
  return nodes;
}

const cursor = (x) => svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });

function curve(one, field, x, y) {
  const points = one.frames.slice(field === "error" ? 0 : 1).map((frame) => `${x(frame.index).toFixed(1)},${y(frame[field]).toFixed(1)}`);
  const now = one.frames[Math.min(one.at, one.frames.length - 1)];
  const line = svg("polyline", { class: `curve c${one.colour}`, points: points.join(" "), "stroke-dasharray": DASHES[one.colour] });
  const dot = now.index > 0 || field === "error" ? svg("circle", { class: `dot c${one.colour}`, cx: x(now.index), cy: y(now[field]), r: 4 }) : null;
  return dot === null ? [line] : [line, dot];
}

function key(one) {
  const line = svg("line", { class: `curve c${one.colour}`, x1: 0, x2: 26, y1: 5, y2: 5, "stroke-dasharray": DASHES[one.colour] });
  return el("li", {}, svg("svg", { width: 26, height: 10, "aria-hidden": "true" }, line), one.title);
}
