// One chart on a canvas: curves and bands over a shared x, with a cross-hair that all charts follow.
import { el } from "../dom.js";
import { before, decimate, nearest, range, smoothed, together } from "./curve.js";
import { figure, stride, tick } from "./format.js";

const HEIGHT = 170, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 22;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
/** Colours, then the same ones dashed. */
export const COLOURS = 6;

/** What the page's style says of colours, asked again when the theme changes. */
export class Palette {
  constructor() {
    this.probe = el("span", { hidden: true, "aria-hidden": "true" });
    document.body.append(this.probe);
    this.read();
  }

  read() {
    const of = (name) => {
      this.probe.className = name;
      return getComputedStyle(this.probe).color;
    };
    this.runs = Array.from({ length: COLOURS }, (_, i) => of(`run-${i}`));
    this.line = of("paint-line");
    this.soft = of("paint-soft");
    this.ink = of("paint-ink");
    this.bad = of("paint-bad");
  }
}

/** An empty canvas of a width, and what draws on it in pixels of the page. */
function cleared(canvas, width) {
  const ratio = Math.min(3, devicePixelRatio || 1);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(HEIGHT * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(HEIGHT * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, HEIGHT);
  return pen;
}

export class Chart {
  /** `signal` is {name, title, says, unit}; `follow(x | null)` moves every cross-hair, `open(run, step)` shows its completions. */
  constructor(signal, palette, follow, open) {
    this.signal = signal;
    this.palette = palette;
    this.lines = [];
    this.options = { smooth: 0, log: false, span: null };
    this.alerts = [];
    this.cross = null;
    // the cross-hair has a canvas of its own, so that moving it draws no curve again
    this.canvas = el("canvas", { class: "base", "aria-hidden": "true" });
    this.above = el("canvas", { class: "above", "aria-hidden": "true" });
    this.readout = el("p", { class: "readout" });
    this.frame = el(
      "div",
      { class: "frame", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": signal.title },
      this.canvas,
      this.above,
    );
    const unit = signal.unit ? el("span", { class: "soft unit" }, ` ${signal.unit}`) : null;
    this.node = el(
      "section",
      { class: "card chart", "data-name": signal.name },
      el("h3", {}, signal.title, unit),
      signal.says ? el("p", { class: "soft small says" }, signal.says) : null,
      this.frame,
      this.readout,
    );
    this.frame.addEventListener("pointermove", (event) => follow(this.at(event)));
    this.frame.addEventListener("pointerleave", () => follow(null));
    this.frame.addEventListener("click", (event) => {
      const x = this.at(event), line = this.lines.find((l) => l.run && l.x.length);
      if (event.pointerType === "mouse" && x !== null && line) open(line.run, line.steps[nearest(line.x, x)]);
    });
    this.frame.addEventListener("keydown", (event) => this.key(event, follow, open));
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  key(event, follow, open) {
    const line = this.lines.find((l) => l.x.length);
    if (!line || !this.scale) return;
    const here = this.cross === null ? null : nearest(line.x, this.cross);
    const last = line.x.length - 1, stride_ = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
    const to = { ArrowRight: here === null ? 0 : here + stride_, ArrowLeft: here === null ? last : here - stride_, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      follow(line.x[Math.max(0, Math.min(last, to))], true);
    } else if (event.key === "Escape") {
      follow(null, true);
    } else if (event.key === "Enter" && here !== null && line.run) {
      open(line.run, line.steps[here]);
    } else return;
    event.preventDefault();
  }

  at(event) {
    if (!this.scale) return null;
    const box = this.canvas.getBoundingClientRect(), { left, width, from, span } = this.scale;
    const share = (event.clientX - box.left - left) / width;
    return share < -0.02 || share > 1.02 ? null : from + Math.max(0, Math.min(1, share)) * span;
  }

  /** `lines` is [{run, label, colour, dash, steps, x, values} or {members: […]} for a band]; several members are drawn as one. */
  show(lines, options, alerts) {
    this.options = options;
    this.alerts = alerts;
    this.lines = lines
      .map((line) => (line.members ? { ...line, ...together(line.members) } : line))
      .filter((line) => line.x.length > 0)
      .map((line) => ({ ...line, drawn: smoothed(line.values, options.smooth) }));
    for (const line of this.lines) {
      if (!line.low) continue;
      line.low = smoothed(line.low, options.smooth);
      line.high = smoothed(line.high, options.smooth);
    }
    this.draw();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (width === 0) return;
    const pen = cleared(this.canvas, width);
    this.scale = this.scaled(width);
    if (this.scale) {
      this.axes(pen, width);
      this.marks(pen);
      this.lines.forEach((line) => this.curve(pen, line));
    }
    this.point(this.cross);
  }

  /** Put the cross-hair at x, or take it away. */
  point(x) {
    this.cross = x;
    const width = this.frame.clientWidth;
    if (width === 0) return;
    const pen = cleared(this.above, width);
    if (this.scale) this.hair(pen);
    this.tell();
  }

  scaled(width) {
    const found = this.lines.filter((line) => line.x.length);
    if (!found.length) return null;
    const [from, to] = this.options.span ?? [Math.min(...found.map((l) => l.x[0])), Math.max(...found.map((l) => l.x[l.x.length - 1]))];
    const span = to - from || 1, log = this.options.log;
    const columns = found.flatMap((l) => (l.low ? [l.drawn, l.low, l.high] : [l.drawn, ...(this.options.smooth > 0 && l.x.length < 5000 ? [l.values] : [])]));
    let [low, high] = range(columns, log) ?? [0, 1];
    if (this.signal.share && !log) [low, high] = [Math.min(0, low), Math.max(high, low + 0.05)];
    const f = log ? Math.log10 : (y) => y;
    let bottom = f(low), top = f(high);
    const pad = (top - bottom || Math.abs(top) || 1) * 0.06;
    top += pad;
    bottom -= this.signal.share && !log && low === 0 ? 0 : pad;
    const height = HEIGHT - TOP - BOTTOM;
    const up = log
      ? (y) => TOP + ((top - Math.log10(y > 0 ? y : 10 ** bottom)) / (top - bottom)) * height
      : (y) => TOP + ((top - y) / (top - bottom)) * height;
    return { left: LEFT, width: width - LEFT - RIGHT, from, span, up, bottom, top, log };
  }

  x(at) {
    const { left, width, from, span } = this.scale;
    return left + ((at - from) / span) * width;
  }

  axes(pen, width) {
    const { bottom, top, log, up, from, span } = this.scale;
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = this.palette.soft;
    pen.strokeStyle = this.palette.line;
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const sparse = log && top - bottom > 1.2;
    const step = sparse ? Math.max(1, Math.ceil((top - bottom) / 4)) : stride(log ? 10 ** top - 10 ** bottom : top - bottom, 5);
    const start = sparse || !log ? bottom : 10 ** bottom, end = sparse || !log ? top : 10 ** top;
    for (let t = Math.ceil(start / step) * step; t <= end + step * 1e-9; t += step) {
      const value = sparse ? 10 ** t : t;
      if (log && value <= 0) continue;
      const y = Math.round(up(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(LEFT, y);
      pen.lineTo(width - RIGHT, y);
      pen.stroke();
      pen.fillText(sparse ? tick(value, value) : tick(t, step), LEFT - 6, y);
    }
    pen.textBaseline = "alphabetic";
    const across = stride(span, Math.max(2, width / 110));
    for (let t = Math.ceil(from / across) * across; t <= from + span + across * 1e-9; t += across) {
      const at = this.x(t);
      pen.textAlign = at > width - RIGHT - 16 ? "right" : at < LEFT + 10 ? "left" : "center";
      pen.fillText(tick(t, across), at, HEIGHT - 6);
    }
  }

  marks(pen) {
    pen.strokeStyle = this.palette.bad;
    pen.fillStyle = this.palette.bad;
    pen.lineWidth = 1;
    for (const x of this.alerts) {
      if (x < this.scale.from || x > this.scale.from + this.scale.span) continue;
      const at = this.x(x);
      pen.setLineDash([2, 3]);
      pen.beginPath();
      pen.moveTo(at, TOP);
      pen.lineTo(at, HEIGHT - BOTTOM);
      pen.stroke();
      pen.setLineDash([]);
      pen.beginPath();
      pen.moveTo(at - 4, TOP - 6);
      pen.lineTo(at + 4, TOP - 6);
      pen.lineTo(at, TOP);
      pen.fill();
    }
  }

  curve(pen, line) {
    const { from, span } = this.scale;
    const start = Math.max(0, before(line.x, from)), end = Math.min(line.x.length, before(line.x, from + span) + 2);
    const stroke = (values, alpha, width) => {
      pen.globalAlpha = alpha;
      pen.lineWidth = width;
      pen.beginPath();
      let pen_down = false;
      decimate(line.x, values, start, end, this.scale, (x, y) => {
        if (pen_down) pen.lineTo(x, y);
        else pen.moveTo(x, y);
        pen_down = true;
      }, () => { pen_down = false; });
      pen.stroke();
    };
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 1, 0, this.scale.width + 3, HEIGHT - BOTTOM + 1);
    pen.clip();
    pen.lineJoin = "round";
    pen.strokeStyle = pen.fillStyle = this.palette.runs[line.colour % COLOURS];
    if (line.low) this.band(pen, line, start, end);
    else if (this.options.smooth > 0) stroke(line.values, 0.22, 1);
    pen.setLineDash(DASHES[line.dash % DASHES.length]);
    stroke(line.drawn, 1, 1.8);
    pen.setLineDash([]);
    if (line.x.length === 1) {
      pen.beginPath();
      pen.arc(this.x(line.x[0]), this.scale.up(line.drawn[0]), 3, 0, 7);
      pen.fill();
    }
    pen.restore();
  }

  band(pen, line, start, end) {
    const edge = [];
    decimate(line.x, line.high, start, end, this.scale, (x, y) => edge.push([x, y]), () => {});
    const back = [];
    decimate(line.x, line.low, start, end, this.scale, (x, y) => back.push([x, y]), () => {});
    pen.globalAlpha = 0.18;
    pen.beginPath();
    [...edge, ...back.reverse()].forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.fill();
  }

  hair(pen) {
    if (this.cross === null || this.cross < this.scale.from || this.cross > this.scale.from + this.scale.span) return;
    pen.globalAlpha = 1;
    pen.strokeStyle = this.palette.soft;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(this.x(this.cross), TOP);
    pen.lineTo(this.x(this.cross), HEIGHT - BOTTOM);
    pen.stroke();
    for (const line of this.lines) {
      const i = nearest(line.x, this.cross);
      if (!Number.isFinite(line.drawn[i])) continue;
      pen.fillStyle = this.palette.runs[line.colour % COLOURS];
      pen.beginPath();
      pen.arc(this.x(line.x[i]), this.scale.up(line.drawn[i]), 3.2, 0, 7);
      pen.fill();
    }
  }

  /** Values at the cross-hair, or the last ones. */
  values() {
    return this.lines.map((line) => {
      const i = this.cross === null ? line.x.length - 1 : nearest(line.x, this.cross);
      const spread = line.low ? ` (${figure(line.low[i])} to ${figure(line.high[i])})` : "";
      return { line, step: line.steps[i], text: `${figure(line.drawn[i])}${spread}` };
    });
  }

  tell() {
    const found = this.values();
    const shown = found.slice(0, 6).map(({ line, text }) => el("span", { class: `run-${line.colour % COLOURS}` }, text));
    const where = this.cross === null || !found.length ? "last" : `step ${figure(found[0].step)}`;
    this.readout.replaceChildren(...(found.length ? [el("span", { class: "soft" }, where), ...shown] : [el("span", { class: "soft" }, "nothing yet")]));
    this.frame.setAttribute("aria-label", `${this.signal.title}. ${this.sentence()} Arrow keys move along it, Enter shows the completions of a step.`);
  }

  sentence() {
    return this.values().map(({ line, step, text }) => `${line.label}: ${text} at step ${figure(step)}.`).join(" ");
  }
}
