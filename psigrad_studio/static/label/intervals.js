// Strengths with their intervals, one line each.
import { svg } from "../dom.js";

const LINE = 30, RIGHT = 24;

export function intervals(places) {
  const narrow = innerWidth < 560;
  const [width, left, letters] = narrow ? [340, 110, 14] : [640, 170, 22];
  const cut = (name) => ([...name].length > letters ? `${[...name].slice(0, letters - 1).join("")}…` : name);
  const low = Math.min(0, ...places.map((p) => p.low ?? 0)), high = Math.max(0, ...places.map((p) => p.high ?? 0));
  const x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - RIGHT);
  const height = places.length * LINE + 26;
  const lines = places.flatMap((place, i) => {
    const y = i * LINE + LINE / 2 + 4;
    return [
      svg("text", { x: left - 14, y: y + 4, "text-anchor": "end" }, cut(place.name)),
      svg("line", { class: "reach", x1: x(place.low), x2: x(place.high), y1: y, y2: y }),
      svg("circle", { class: "at", cx: x(place.strength), cy: y, r: 5 }),
    ];
  });
  const ticks = steps(low, high, narrow ? 5 : 8).flatMap((value) => [
    svg("line", { class: value === 0 ? "zero" : "rule", x1: x(value), x2: x(value), y1: 0, y2: height - 22 }),
    svg("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, String(value).replace("-", "−")),
  ]);
  const label = "Strengths with 95 % intervals; the table below has the numbers";
  return svg("svg", { class: "intervals", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...ticks, ...lines);
}

function steps(low, high, most) {
  const size = [0.5, 1, 2, 5, 10, 20, 50].find((each) => (high - low) / each <= most) ?? 100;
  const found = [];
  for (let n = Math.ceil(low / size); n * size <= high; n++) found.push(n * size + 0);
  return found;
}
