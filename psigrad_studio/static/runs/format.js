// Formats of numbers and times for people.

const MINUS = "−";

/** Return a number with four significant digits; a dash if it is missing or not finite. */
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return scientific(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en").replaceAll(",", "\u202f") : String(Number(value.toPrecision(4)));
  return text.replace("-", MINUS);
}

/** Return a number such as 1.2·10⁻⁹. */
function scientific(value) {
  const [mantissa, power] = value.toExponential(2).split("e");
  const raised = String(Number(power)).replace("-", "⁻").replace(/[0-9]/g, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]);
  return `${String(Number(mantissa)).replace("-", MINUS)}·10${raised}`;
}

/** Return a whole number with narrow no-break spaces between thousands. */
export const whole = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");

/** Return seconds in the largest unit that fits. */
export function duration(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.max(0, Math.round(seconds))} s`;
}

/** Return how long ago a time was, given in seconds since 1970. */
export const ago = (time) => (time > 0 ? `${duration(Date.now() / 1000 - time)} ago` : "");

/** Return the label of a tick, with as few digits as distinguish it from its neighbours. */
export function tick(value, step) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`.replace("-", MINUS);
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`.replace("-", MINUS);
  if (size !== 0 && size < 1e-3) {
    const digits = Math.max(1, Math.min(4, 1 + Math.ceil(Math.log10(size / step) - 1e-9)));
    return Number(value.toPrecision(digits)).toExponential().replaceAll("-", MINUS);
  }
  let digits = 0; // as many as the step has, so that 0.25 does not become 0.3
  while (digits < 6 && Math.abs(Math.round(step * 10 ** digits) - step * 10 ** digits) > 1e-6 * step * 10 ** digits) digits += 1;
  return String(Number(value.toFixed(digits))).replace("-", MINUS);
}
