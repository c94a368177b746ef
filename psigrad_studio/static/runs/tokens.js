// The tokens of a completion in colours. The values of the token under the pointer or the keyboard cursor are shown.
import { el } from "../dom.js";
import { figure } from "./format.js";

/** The quantities that a colour can show: title, explanation, and the value with no colour if there are two colours. */
export const MEASURES = {
  logprob: { title: "log-prob", says: "stronger: the policy drew a less likely token" },
  ratio: { title: "ratio", says: "green above 1: more likely than before; orange below 1: less likely", middle: 1 },
  kl: { title: "KL", says: "stronger: further from the reference" },
  entropy: { title: "entropy", says: "stronger: the policy was less certain" },
  advantage: { title: "advantage", says: "green: encouraged; orange: discouraged", middle: 0 },
  gap: { title: "sampler − trainer", says: "stronger: sampler and trainer disagree more" },
  mask: { title: "mask", says: "grey: not chosen by the policy, not trained on" },
};

/** Return the names of the MEASURES for which a group's members have values. */
export function measures(members) {
  const has = (name) => members.some((m) => m.tokens?.[name]?.some((v) => v !== null));
  const found = ["logprob", "ratio", "kl", "entropy", "advantage"].filter(has);
  if (has("sampling")) found.push("gap");
  if (members.some((m) => m.tokens?.mask?.includes(false))) found.push("mask");
  return found;
}

const value = (tokens, name, i) => {
  if (name === "gap") return tokens.sampling?.[i] == null || tokens.logprob?.[i] == null ? null : tokens.sampling[i] - tokens.logprob[i];
  return name === "mask" ? (tokens.mask[i] ? 1 : 0) : tokens[name]?.[i] ?? null;
};

/** Return the largest distance from the middle in a group, which has the strongest colour. */
export function reach(members, name) {
  const middle = MEASURES[name].middle ?? 0;
  let most = 0;
  for (const { tokens } of members) {
    if (!tokens) continue;
    for (let i = 0; i < tokens.text.length; i++) {
      const v = value(tokens, name, i);
      if (v !== null && tokens.mask[i]) most = Math.max(most, Math.abs(v - middle));
    }
  }
  return most;
}

function said(tokens, i) {
  const parts = [`“${tokens.text[i]}”`];
  if (!tokens.mask[i]) parts.push("not chosen by the policy");
  for (const [name, { title }] of Object.entries(MEASURES)) {
    if (name === "mask" || !tokens.mask[i]) continue;
    const v = value(tokens, name, i);
    if (v !== null) parts.push(`${title} ${figure(v)}`);
  }
  if (tokens.logprob?.[i] != null && tokens.mask[i]) parts.push(`p ${figure(Math.exp(tokens.logprob[i]))}`);
  if (tokens.earned?.[i] != null) parts.push(`reward ${figure(tokens.earned[i])}`);
  return `${i + 1} of ${tokens.text.length}: ${parts.join(" · ")}`;
}

/** Return a completion's tokens. `tell(text)` is called with the description of the token under the pointer. */
export function tokenText(tokens, name, most, label, tell) {
  const middle = MEASURES[name]?.middle ?? 0;
  const spans = tokens.text.map((text, i) => {
    const v = name ? value(tokens, name, i) : null;
    const span = el("span", { class: "token", "data-i": i }, text);
    if (!tokens.mask[i]) span.classList.add("masked");
    else if (v !== null && name !== "mask" && most > 0) {
      span.classList.add(MEASURES[name].middle === undefined ? "seen" : v >= middle ? "up" : "down");
      span.style.setProperty("--s", Math.sqrt(Math.min(1, Math.abs(v - middle) / most)).toFixed(3));
    }
    if (tokens.earned?.[i] != null) span.classList.add("earned");
    return span;
  });
  let here = -1;
  const go = (i) => {
    spans[here]?.classList.remove("here");
    here = Math.max(0, Math.min(spans.length - 1, i));
    spans[here]?.classList.add("here");
    if (spans[here]) tell(said(tokens, here));
  };
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `${label}. Arrow keys read it token by token.` }, ...spans);
  box.addEventListener("keydown", (event) => {
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined) return;
    go(to);
    event.preventDefault();
  });
  box.addEventListener("pointerover", (event) => {
    if (event.target.dataset.i !== undefined) go(Number(event.target.dataset.i));
  });
  box.addEventListener("pointerdown", (event) => {
    if (event.target.dataset.i !== undefined) go(Number(event.target.dataset.i));
  });
  return box;
}
