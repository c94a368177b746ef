// The chart of one metric of the chosen runs, drawn by uPlot. All charts share the cross-hair and the zoom.
import { el } from "../dom.js";
import { colour, DASHES, join, plot } from "../plot.js";
import { nearest, smoothed, together } from "./curve.js";
import { figure, tick } from "./format.js";

const HEIGHT = 170;
/** The number of colours for runs in the style sheet. The seventh run has the first colour again, dashed. */
export const COLOURS = 6;

/** Return the range of x. For a single step it is one longer, since uPlot would show an axis to 100. */
const ends = (steps = [0]) => [steps[0], steps.at(-1) > steps[0] ? steps.at(-1) : steps[0] + 1];

export class Chart {
  /** `signal` is {name, title, says, unit, share}; `page` has follow(x | null, aloud), zoom([from, to] | null), open(run, step). */
  constructor(signal, page) {
    Object.assign(this, { signal, page, lines: [], alerts: [], options: { smooth: 0, log: false, zoom: null }, cross: null, plot: null, shape: "" });
    this.frame = el("div", { class: "frame", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": signal.title });
    this.readout = el("p", { class: "readout" });
    const unit = signal.unit ? el("span", { class: "soft unit" }, ` ${signal.unit}`) : null;
    this.node = el(
      "section",
      { class: "card chart", "data-name": signal.name },
      el("h3", {}, el("span", {}, signal.title, unit), signal.group ? el("span", { class: "group-name soft" }, signal.group) : null),
      el("p", { class: "soft small says" }, signal.says),
      this.frame,
      this.readout,
    );
    this.frame.addEventListener("pointermove", (event) => page.follow(this.at(event)));
    this.frame.addEventListener("pointerleave", () => page.follow(null));
    this.frame.addEventListener("click", (event) => {
      const x = this.at(event), line = this.lines[0];
      if (event.pointerType === "mouse" && x !== null) page.open(line.run, line.steps[nearest(line.x, x)]);
    });
    this.frame.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  key(event) {
    const line = this.lines[0];
    if (!line || !this.plot) return;
    const here = this.cross === null ? null : nearest(line.x, this.cross);
    const last = line.x.length - 1, stride = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    const to = { ArrowRight: here === null ? 0 : here + stride, ArrowLeft: here === null ? last : here - stride, Home: 0, End: last }[event.key];
    const reach = { "+": 0.25, "=": 0.25, "-": 1 }[event.key];
    if (to !== undefined) {
      this.page.follow(line.x[Math.max(0, Math.min(last, to))], true);
    } else if (reach !== undefined) {
      const { min, max } = this.plot.scales.x, middle = this.cross ?? (min + max) / 2;
      const zoom = [Math.max(line.x[0], middle - reach * (max - min)), Math.min(line.x[last], middle + reach * (max - min))];
      this.page.zoom(zoom[0] > line.x[0] || zoom[1] < line.x[last] ? zoom : null);
    } else if (event.key === "Escape") {
      this.page.follow(null, true);
      this.page.zoom(null);
    } else if (event.key === "Enter" && here !== null) {
      this.page.open(line.run, line.steps[here]);
    } else return;
    event.preventDefault();
  }

  /** Return the x under the pointer; null outside the curves. */
  at(event) {
    if (!this.plot) return null;
    const box = this.plot.over.getBoundingClientRect(), left = event.clientX - box.left;
    return left < -8 || left > box.width + 8 ? null : this.plot.posToVal(Math.max(0, Math.min(box.width, left)), "x");
  }

  /** `lines` is [{run, label, colour, dash, steps, x, values} or {members: […]} for a band]; `alerts` holds their x. */
  show(lines, options, alerts) {
    const { smooth, log } = options;
    this.options = options;
    this.alerts = alerts;
    this.lines = lines
      .map((line) => (line.members ? { ...line, ...together(line.members) } : line))
      .filter((line) => line.x.length > 0)
      .map((line) => ({ ...line, drawn: smoothed(line.values, smooth), low: line.low && smoothed(line.low, smooth), high: line.high && smoothed(line.high, smooth) }));
    const shape = JSON.stringify([log, smooth > 0, this.lines.map(({ colour: c, dash, low, x }) => [c, dash, Boolean(low), x.length === 1])]);
    if (shape !== this.shape) this.plot = this.plot?.destroy() ?? null;
    this.shape = shape;
    this.node.classList.toggle("flat", this.flat);
    this.draw();
  }

  /** True if all values are 0. Such a chart shows only its title. */
  get flat() {
    return this.alerts.length === 0 && this.lines.length > 0 && this.lines.every((line) => line.values.every((y) => y === 0));
  }

  draw() {
    const width = this.frame.clientWidth;
    if (width > 0 && this.lines.length) {
      this.plot ??= plot(this.frame, HEIGHT, this.described());
      this.plot.batch(() => {
        if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
        this.plot.setData(join(this.lines.map((line) => [line.x, ...this.columns(line)])));
      });
    }
    this.point(this.cross);
  }

  /** Return the series of a line in the order of `described`: the ends of a band or the unsmoothed values, then the line. */
  columns({ values, drawn, low, high }) {
    if (low) return [low, high, drawn];
    return this.options.smooth > 0 ? [values, drawn] : [drawn];
  }

  described() {
    const series = [{}], bands = [], lines = new Set(), points = { show: false };
    for (const line of this.lines) {
      const stroke = () => colour(`--r${line.colour}`);
      if (line.low) {
        bands.push({ series: [series.length + 1, series.length], fill: stroke });
        series.push({ width: 0, points }, { width: 0, alpha: 0.18, points });
      } else if (this.options.smooth > 0) series.push({ stroke, width: 1, alpha: 0.22, points });
      lines.add(series.length);
      series.push({ stroke, width: 1.8, dash: DASHES[line.dash % DASHES.length], points: { show: line.x.length === 1, size: 6, fill: stroke } });
    }
    return {
      series, bands,
      x: { text: tick, range: ({ data: [steps] }) => this.options.zoom ?? ends(steps) },
      y: { text: (value, step) => tick(value, this.options.log ? value / 100 : step), range: (_, low, high) => this.range(low, high), log: this.options.log },
      cursor: {
        y: false,
        points: { show: (_, i) => (lines.has(i) ? el("div", { class: "hover-point" }) : null) },
        drag: { setScale: false, dist: 8 },
        bind: { dblclick: () => () => this.page.zoom(null) },
      },
      hooks: { setSelect: [(u) => this.selected(u)], draw: [(u) => this.marks(u)] },
    };
  }

  /** Zoom to a range that was drawn with the mouse. */
  selected(u) {
    const { left, width } = u.select;
    if (width === 0) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.page.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  /** Return the range of y for the smallest and the largest drawn value. */
  range(low, high) {
    const { log } = this.options, share = this.signal.share && !log;
    if (!Number.isFinite(low) || !Number.isFinite(high)) return log ? [0.1, 1] : [0, 1];
    if (share) [low, high] = [Math.min(0, low), Math.max(high, low + 0.05)];
    const [bottom, top] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const span = top - bottom > 1e-9 * Math.abs(top) ? top - bottom : 0; // a smaller span is only rounding
    const pad = (span || Math.abs(top) || 1) * 0.06, below = share && low === 0 ? 0 : pad;
    return log ? [10 ** (bottom - pad), 10 ** (top + pad)] : [bottom - below, top + pad];
  }

  /** Draw a dotted line and a triangle at the first step of each warning. */
  marks({ ctx, bbox, scales, valToPos }) {
    const ratio = devicePixelRatio, size = 5 * ratio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--bad");
    ctx.lineWidth = ratio;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    for (const x of this.alerts.filter((at) => at >= scales.x.min && at <= scales.x.max)) {
      const left = valToPos(x, "x", true);
      ctx.stroke(new Path2D(`M${left} ${bbox.top}v${bbox.height}`));
      ctx.fill(new Path2D(`M${left - size} ${bbox.top - size}h${2 * size}l${-size} ${size}z`));
    }
    ctx.restore();
  }

  /** Move the cross-hair to x, or remove it (null). */
  point(x) {
    this.cross = x;
    if (this.plot) {
      const { min, max } = this.plot.scales.x, hidden = x === null || x < min || x > max;
      this.plot.setCursor({ left: hidden ? -10 : this.plot.valToPos(x, "x"), top: hidden ? -10 : 0 }, false);
    }
    const found = this.values();
    const shown = found.slice(0, 6).map(({ line, text }) => el("span", { class: `run-${line.colour}` }, text));
    const where = x === null ? "last" : `step ${figure(found[0]?.step)}`;
    if (this.flat) this.readout.replaceChildren("0 at every step");
    else this.readout.replaceChildren(el("span", { class: "soft" }, found.length ? where : "no figures yet"), ...shown);
    const keys = "Arrow keys move along the curve, plus and minus zoom, Enter shows the completions of a step.";
    this.frame.setAttribute("aria-label", `${this.signal.title}. ${this.sentence()} ${keys}`);
  }

  /** Return the values at the cross-hair, or the last ones. */
  values() {
    return this.lines.map((line) => {
      const i = this.cross === null ? line.x.length - 1 : nearest(line.x, this.cross);
      const spread = line.low ? ` (${figure(line.low[i])} to ${figure(line.high[i])})` : "";
      return { line, step: line.steps[i], text: `${figure(line.drawn[i])}${spread}` };
    });
  }

  sentence() {
    return this.values().map(({ line, step, text }) => `${line.label}: ${text} at step ${figure(step)}.`).join(" ");
  }
}
