// Mathematics of curves, without a page: smoothing, seeds together, what a column of pixels shows.

/** Exponential moving average without a bias to its start: m ← α·m + (1 − α)·y, divided by 1 − αⁿ. Gaps stay gaps. */
export function smoothed(values, alpha) {
  if (alpha <= 0) return values;
  const out = new Float64Array(values.length);
  let mean = 0, weight = 0;
  for (let i = 0; i < values.length; i++) {
    const y = values[i];
    if (!Number.isFinite(y)) {
      out[i] = NaN;
      continue;
    }
    mean = alpha * mean + (1 - alpha) * y;
    weight = alpha * weight + (1 - alpha);
    out[i] = mean / weight;
  }
  return out;
}

/** Runs of several seeds as one: at each step that two or more of them have, mean, least and largest value; x is the mean x. */
export function together(curves) {
  const sums = new Map();
  for (const { steps, x, values } of curves) {
    for (let i = 0; i < steps.length; i++) {
      if (!Number.isFinite(values[i])) continue;
      const found = sums.get(steps[i]);
      if (found === undefined) sums.set(steps[i], [1, values[i], values[i], values[i], x[i]]);
      else {
        found[0] += 1;
        found[1] += values[i];
        found[2] = Math.min(found[2], values[i]);
        found[3] = Math.max(found[3], values[i]);
        found[4] += x[i];
      }
    }
  }
  const wanted = Math.min(2, curves.length);
  let steps = [...sums.keys()].filter((step) => sums.get(step)[0] >= wanted).sort((a, b) => a - b);
  if (steps.length < 2) return binned(curves);
  const column = (k, divide) => Float64Array.from(steps, (step) => sums.get(step)[k] / (divide ? sums.get(step)[0] : 1));
  return { steps, x: column(4, true), values: column(1, true), low: column(2), high: column(3) };
}

/** Seeds whose steps don't meet (whole episodes end where they end): the mean of what lies in each of 200 stretches. */
function binned(curves) {
  const ends = curves.flatMap((c) => (c.x.length ? [c.x[0], c.x[c.x.length - 1]] : []));
  const first = Math.min(...ends), last = Math.max(...ends);
  const longest = Math.max(1, ...curves.map((c) => c.x.length));
  const count = Math.max(2, Math.min(200, longest)), width = (last - first) / count || 1;
  const means = curves.map((c) => {
    const sum = new Float64Array(count), seen = new Float64Array(count);
    for (let i = 0; i < c.x.length; i++) {
      if (!Number.isFinite(c.values[i])) continue;
      const bin = Math.min(count - 1, Math.floor((c.x[i] - first) / width));
      sum[bin] += c.values[i];
      seen[bin] += 1;
    }
    return Float64Array.from(sum, (s, i) => (seen[i] ? s / seen[i] : NaN));
  });
  const out = { steps: [], x: [], values: [], low: [], high: [] };
  for (let bin = 0; bin < count; bin++) {
    const known = means.map((m) => m[bin]).filter(Number.isFinite);
    if (known.length < Math.min(2, curves.length)) continue;
    const at = first + (bin + 0.5) * width;
    out.steps.push(at);
    out.x.push(at);
    out.values.push(known.reduce((a, b) => a + b, 0) / known.length);
    out.low.push(Math.min(...known));
    out.high.push(Math.max(...known));
  }
  return out;
}

/** The least and the largest y, of those that a scale can show. */
export function range(columns, log) {
  let low = Infinity, high = -Infinity;
  for (const values of columns) {
    for (let i = 0; i < values.length; i++) {
      const y = values[i];
      if (y < low && (!log || y > 0)) low = y;
      if (y > high && y < Infinity) high = y;
    }
  }
  return low <= high && low > -Infinity ? [low, high] : null;
}

/** The place of the last x that is at most `at`, or 0. */
export function before(x, at) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** The place of the x nearest to `at`. */
export function nearest(x, at) {
  const i = before(x, at);
  return i + 1 < x.length && x[i + 1] - at < at - x[i] ? i + 1 : i;
}

/**
 * A curve as line segments, at most four points for each column of pixels: the first, the least, the largest and the last.
 * `place` receives (column, y); `lift` starts a new stroke after a gap.
 */
export function decimate(x, values, start, end, scale, place, lift) {
  const { left, width, from, span, up } = scale;
  const k = width / span;
  let column = -1, first = 0, low = 0, high = 0, last = 0, lowAt = 0, highAt = 0, open = false;
  const flush = () => {
    if (column < 0) return;
    const at = left + column + 0.5;
    place(at, up(first));
    if (low < high) {
      if (lowAt < highAt) { place(at, up(low)); place(at, up(high)); } else { place(at, up(high)); place(at, up(low)); }
      place(at, up(last));
    }
    column = -1;
  };
  for (let i = start; i < end; i++) {
    const y = values[i];
    if (!(y > -Infinity && y < Infinity)) {
      flush();
      if (open) lift();
      open = false;
      continue;
    }
    const now = ((x[i] - from) * k) | 0;
    open = true;
    if (now !== column) {
      flush();
      column = now;
      first = low = high = last = y;
      lowAt = highAt = i;
    } else {
      if (y < low) { low = y; lowAt = i; }
      if (y > high) { high = y; highAt = i; }
      last = y;
    }
  }
  flush();
}
