// uPlot in the studio's look: the colours of the theme and axes without ticks.
import { el } from "./dom.js";
import uPlot from "./vendor/uplot/uPlot.js";

/** Dashes that distinguish lines of the same colour, and all lines without colour vision. */
export const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
export const join = uPlot.join;

const plots = new Set(), colours = new Map(), probe = el("span", { hidden: true });
document.body.append(probe);

/** Return a custom property of the style sheet as a colour for a canvas. */
export function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

function repaint() {
  colours.clear();
  for (const plot of plots) plot.redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new MutationObserver(repaint).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });

/** Return the ticks of a logarithmic axis: powers of ten; below three decades also 2 and 5 times them; below one, linear steps. */
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), span = Math.log10(high / low);
  let ticks;
  if (span < 1) {
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw)), step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
    const least = Math.ceil(low / step);
    ticks = Array.from({ length: Math.floor(high / step) - least + 1 }, (_, i) => (least + i) * step);
  } else {
    const every = Math.ceil(span / 6), powers = Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => last - i * every).reverse();
    ticks = powers.flatMap((power) => (span < 3 ? [1, 2, 5] : [1]).map((m) => m * 10 ** power));
  }
  return ticks.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
}

/** An axis with grid lines and no tick marks. `text(value, step)` returns the label of a value; `step` is the distance of labels. */
const axis = (size, space, { text, log }, lines) => ({
  ...(log ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits } : {}),
  size, space, gap: 6, font: "11px system-ui, sans-serif", ticks: { show: false },
  stroke: () => colour("--soft"),
  grid: { show: lines, width: 1, stroke: () => colour("--line") },
  values: (_, splits, __, ___, step) => splits.map((value) => text(value, step)),
});

const wide = (_, labels) => Math.max(52, 10 + 7 * Math.max(...(labels ?? [""]).map((label) => label.length)));

/** Create an empty chart inside `node`. `x` and `y` are {range, text, log}; `options` are further options of uPlot. */
export function plot(node, height, { x, y, ...options }) {
  const made = new uPlot({
    width: node.clientWidth, height, padding: [10, 18, 0, 0], legend: { show: false },
    scales: { x: { time: false, range: x.range }, y: { range: y.range, distr: y.log ? 3 : 1 } },
    axes: [axis(24, 55, x, false), axis(wide, 26, y, true)],
    ...options,
    hooks: { destroy: [() => plots.delete(made)], ...options.hooks },
  }, null, node);
  plots.add(made);
  return made;
}
