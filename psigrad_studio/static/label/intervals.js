// Strengths with their intervals, one line each.
import { svg } from "../dom.js";

const LINE = 30,
  RIGHT = 24;

export function intervals(places) {
  const narrow = innerWidth < 560;
  const WIDTH = narrow ? 340 : 640,
    LEFT = narrow ? 110 : 170,
    LETTERS = narrow ? 14 : 22;
  const cut = (name) => ([...name].length > LETTERS ? `${[...name].slice(0, LETTERS - 1).join("")}…` : name);
  const low = Math.min(0, ...places.map((p) => p.low ?? 0)),
    high = Math.max(0, ...places.map((p) => p.high ?? 0));
  const reach = high - low || 1;
  const x = (value) => LEFT + ((value - low) / reach) * (WIDTH - LEFT - RIGHT);
  const height = places.length * LINE + 26;
  const lines = places.flatMap((place, i) => {
    const y = i * LINE + LINE / 2 + 4;
    return [
      svg("text", { x: LEFT - 14, y: y + 4, "text-anchor": "end" }, cut(place.name)),
      svg("line", { class: "reach", x1: x(place.low), x2: x(place.high), y1: y, y2: y }),
      svg("circle", { class: "at", cx: x(place.strength), cy: y, r: 5 }),
    ];
  });
  const foot = height - 6;
  const ticks = steps(low, high).flatMap((value) => [
    svg("line", { class: value === 0 ? "zero" : "rule", x1: x(value), x2: x(value), y1: 0, y2: height - 22 }),
    svg("text", { x: x(value), y: foot, "text-anchor": "middle" }, String(value).replace("-", "−")),
  ]);
  return svg(
    "svg",
    {
      class: "intervals",
      viewBox: `0 0 ${WIDTH} ${height}`,
      role: "img",
      "aria-label": "Strengths with 95 % intervals; the table below has the numbers",
    },
    ...ticks,
    ...lines,
  );
}

function steps(low, high) {
  const size = [0.5, 1, 2, 5, 10, 20, 50].find((each) => (high - low) / each <= (innerWidth < 560 ? 5 : 8)) ?? 100;
  const found = [];
  for (let n = Math.ceil(low / size); n * size <= high; n++) found.push(n * size + 0);
  return found;
}
