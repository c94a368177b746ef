// Computations on curves: smoothing, and the band of several seeds. Missing values are null.

/** Return the exponential moving average m ← α·m + (1 − α)·y, divided by 1 − αⁿ to remove the bias of the start. Gaps stay. */
export function smoothed(values, alpha) {
  if (alpha <= 0) return values;
  const out = Array(values.length).fill(null);
  let mean = 0, weight = 0;
  for (let i = 0; i < values.length; i++) {
    const y = values[i];
    if (y === null) continue;
    mean = alpha * mean + (1 - alpha) * y;
    weight = alpha * weight + (1 - alpha);
    out[i] = mean / weight;
  }
  return out;
}

/** Merge the curves of several seeds: mean, minimum and maximum at each step that at least two have, and the mean of x. */
export function together(curves) {
  const sums = new Map();
  for (const { steps, x, values } of curves) {
    for (let i = 0; i < steps.length; i++) {
      if (values[i] === null) continue;
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
  const steps = [...sums.keys()].filter((step) => sums.get(step)[0] >= wanted).sort((a, b) => a - b);
  if (steps.length < 2) return binned(curves);
  const column = (k, divide) => steps.map((step) => sums.get(step)[k] / (divide ? sums.get(step)[0] : 1));
  return { steps, x: column(4, true), values: column(1, true), low: column(2), high: column(3) };
}

/** Merge curves with different steps, such as those of complete episodes: the means in each of at most 200 equal intervals. */
function binned(curves) {
  const ends = curves.flatMap((c) => (c.x.length ? [c.x[0], c.x[c.x.length - 1]] : []));
  const first = Math.min(...ends), last = Math.max(...ends);
  const longest = Math.max(1, ...curves.map((c) => c.x.length));
  const count = Math.max(2, Math.min(200, longest)), width = (last - first) / count || 1;
  const means = curves.map((c) => {
    const sum = new Float64Array(count), seen = new Float64Array(count);
    for (let i = 0; i < c.x.length; i++) {
      if (c.values[i] === null) continue;
      const bin = Math.min(count - 1, Math.floor((c.x[i] - first) / width));
      sum[bin] += c.values[i];
      seen[bin] += 1;
    }
    return Array.from(sum, (s, i) => (seen[i] ? s / seen[i] : null));
  });
  const out = { steps: [], x: [], values: [], low: [], high: [] };
  for (let bin = 0; bin < count; bin++) {
    const known = means.map((m) => m[bin]).filter((m) => m !== null);
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

/** Return the index of the last x that is at most `at`, or 0. */
function before(x, at) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

/** Return the index of the x nearest to `at`. */
export function nearest(x, at) {
  const i = before(x, at);
  return i + 1 < x.length && x[i + 1] - at < at - x[i] ? i + 1 : i;
}
