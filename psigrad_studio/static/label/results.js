// What the answers say: progress, agreement, whether the side decides, the ranking, people; and exports.
import { download, get } from "../api.js";
import { el, notice } from "../dom.js";
import { intervals } from "./intervals.js";
import { table } from "./people.js";

const share = (x) => (x === null || x === undefined ? "–" : `${Math.round(x * 100)} %`);
const figure = (x) => (x === null || x === undefined ? "–" : x.toFixed(2).replace("-", "−"));
const BY = { sampler: "sampler", run: "run", step: "run and step", completion: "single completion" };
const WHY = {
  tie: "ties",
  both_bad: "both bad",
  split: "no majority",
  middle: "middle ratings",
  alone: "nothing to compare",
  skipped: "skipped",
  unanswered: "unanswered",
  check: "attention checks",
};

/** What can be looked at by itself: [name, label]. The first is shown first. */
function aspects(project, train = false) {
  const own = project.questions.filter(({ kind }) => kind === "better" || kind === "scale" || (kind === "choice" && !train)).map(({ name }) => [name, name]);
  const weighed = project.questions.filter(({ kind, weight }) => (kind === "better" || kind === "scale") && weight > 0).length > 1;
  return [...(project.overall ? [["", own.length ? "overall" : ""]] : []), ...own, ...(weighed ? [["weighted", "weighted"]] : [])];
}

const picker = (label, options, onchange) => el("select", { "aria-label": label, onchange }, ...options.map(([value, text]) => el("option", { value }, text)));

export async function results(root, project) {
  const by = el(
    "select",
    { "aria-label": "Rank by", onchange: () => draw() },
    ...Object.entries(BY).map(([value, label]) => el("option", { value }, `by ${label}`)),
  );
  const asked = aspects(project), on = picker("Question", asked, () => draw());
  const waiting = el("p", { class: "soft", role: "status" }, "Counting …");
  const body = el("div", { class: "stack" }, waiting);
  root.replaceChildren(body, exports_(project));

  async function draw() {
    try {
      const found = await get(`/api/label/results?project=${project.id}&by=${by.value}&aspect=${encodeURIComponent(on.value)}`);
      body.replaceChildren(
        done(found.progress),
        ...[asked.length > 1 ? each(found.aspects, on) : null].filter(Boolean),
        el("div", { class: "columns" }, ...(found.agreement ? [agreement(found.agreement), position(found.agreement.position)] : []).filter(Boolean)),
        ranking(found.ranking, by),
        ...[found.agreement && people(found)].filter(Boolean),
      );
    } catch (error) {
      if (!waiting.isConnected) notice(error.message);
      else body.replaceChildren(el("p", { class: "failure", role: "alert" }, error.message));
    }
  }

  await draw();
}

const card = (title, ...content) => el("section", { class: "card stack" }, el("h2", {}, title), ...content);
const tile = (value, label, say) =>
  el("div", { class: "tile" }, el("strong", {}, value), el("span", {}, label), say ? el("small", { class: "soft" }, say) : null);

function done({ tasks, wanted, answered, leased, skipped }) {
  const bar = el("progress", { max: Math.max(1, wanted), value: answered, "aria-label": "Received answers" });
  const says = [`${tasks} ${tasks === 1 ? "task" : "tasks"}`, leased ? `${leased} being answered` : null, skipped ? `${skipped} skipped` : null]
    .filter(Boolean)
    .join(" · ");
  return card(
    "Progress",
    el("p", {}, el("strong", {}, `${answered} of ${wanted}`), " answers received. ", el("span", { class: "soft" }, says)),
    bar,
  );
}

/** Every question side by side; one of them is looked at below. */
function each(found, on) {
  const rows = Object.entries(found).map(([name, { percent, alpha, shared }]) => {
    const best = alpha.ordinal ?? alpha.nominal;
    const interval = best.value === null ? "–" : `${figure(best.low)} to ${figure(best.high)}`;
    const cells = [share(percent), figure(best.value), interval, String(shared)];
    return el("tr", {}, el("th", { scope: "row" }, name || "overall"), ...cells.map((cell) => el("td", { class: "n" }, cell)));
  });
  return card("By question", table(["Question", " Equal answers", " Alpha", " 95 %", " Shared"], rows), el("label", { class: "row" }, "Below: ", on));
}

function agreement({ units, shared, percent, alpha, fleiss, cohen, gold }) {
  const best = alpha.ordinal ?? alpha.nominal;
  const tiles = [
    tile(share(percent), "equal answers", `pairs of answers to one of ${shared} shared units`),
    tile(
      figure(best.value),
      `Krippendorff's alpha${alpha.ordinal ? ", ordinal" : ""}`,
      best.value === null ? `of ${best.units} units` : `${figure(best.low)} to ${figure(best.high)}, ${best.units} units`,
    ),
    fleiss === null ? null : tile(figure(fleiss), "Fleiss' kappa"),
    gold[""] ? tile(share(gold[""].value), "known answers right", `${gold[""].n} given`) : null,
  ];
  const pairs = cohen.filter((pair) => pair.units > 0);
  const rows = pairs.map((pair) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, `${pair.first} and ${pair.second}`),
      el("td", { class: "n" }, figure(pair.value)),
      el("td", { class: "n" }, String(pair.units)),
    ),
  );
  return card(
    "Agreement",
    shared ? null : el("p", { class: "soft" }, `${units} units are answered, none of them by two people yet.`),
    el("div", { class: "tiles" }, ...tiles),
    pairs.length ? el("details", {}, el("summary", {}, "Cohen's kappa of each pair of people"), table(["People", " Kappa", " Units"], rows)) : null,
  );
}

function position(position) {
  const all = position[""];
  if (!all) return null;
  const odd = all.p_value !== null && all.p_value < 0.05;
  return card(
    "Position bias",
    el(
      "p",
      {},
      el("strong", { class: odd ? "failure" : "" }, odd ? "Possible: " : "No sign of it: "),
      `the left side was chosen in ${share(all.value)} of ${all.n} decisions (95 %: ${share(all.low)} to ${share(all.high)}).`,
    ),
    el(
      "p",
      { class: "soft" },
      `Sides are drawn at random, so one half is expected; p = ${all.p_value === null ? "–" : all.p_value < 0.001 ? "below 0.001" : all.p_value.toFixed(3)} (exact binomial test).`,
    ),
  );
}

function ranking(found, by) {
  const head = el("div", { class: "row between" }, el("h2", {}, "Ranking"), by);
  if (found.why) return el("section", { class: "card stack" }, head, el("p", { class: "soft" }, found.why));
  const rows = found.places.map((place, i) =>
    el(
      "tr",
      {},
      el("td", { class: "n" }, String(i + 1)),
      el("th", { scope: "row" }, place.name),
      el("td", { class: "n" }, figure(place.strength)),
      el("td", { class: "n soft" }, `${figure(place.low)} to ${figure(place.high)}`),
      el("td", { class: "n" }, place.best_rank === place.worst_rank ? String(place.best_rank) : `${place.best_rank}–${place.worst_rank}`),
      el("td", { class: "n" }, String(place.comparisons)),
    ),
  );
  const notes = [
    `Bradley–Terry strengths from ${found.comparisons} comparisons, with 95 % intervals; one more is odds of 2.7 to 1.`,
    found.prior_sd === null ? null : `One entry never lost or never won, so a weak prior (standard deviation ${found.prior_sd}) limits the strengths.`,
    found.same ? `${found.same} comparisons within one entry are left out.` : null,
    found.shared ? `${found.shared} comparisons of a text with several origins are left out.` : null,
    found.competitors > found.places.length ? `The best ${found.places.length} of ${found.competitors} are shown.` : null,
  ]
    .filter(Boolean)
    .join(" ");
  return el(
    "section",
    { class: "card stack" },
    head,
    intervals(found.places.slice(0, 20)),
    table(["", "Name", " Strength", " 95 %", " Rank", " Comparisons"], rows),
    el("p", { class: "soft small" }, notes),
  );
}

function people({ progress, agreement }) {
  const names = Object.keys(progress.by_person);
  if (!names.length) return null;
  const kappa = (name) => {
    const mine = agreement.cohen.filter((pair) => (pair.first === name || pair.second === name) && pair.value !== null);
    const units = mine.reduce((n, pair) => n + pair.units, 0);
    return units ? mine.reduce((sum, pair) => sum + pair.value * pair.units, 0) / units : null;
  };
  const sided = Object.keys(agreement.position).length > 0,
    known = Object.keys(agreement.gold).length > 0;
  const of = (found) => (found ? `${share(found.value)} of ${found.n}` : "–");
  const rate = (found) => {
    if (!found) return el("td", { class: "n" }, "–");
    const guessing = found.n >= 8 && found.low <= 0.5;
    return el("td", { class: `n${guessing ? " failure" : ""}` }, `${share(found.value)} of ${found.n} (${share(found.low)} to ${share(found.high)})${guessing ? ": could be guessing" : ""}`);
  };
  const rows = names.map((name) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      el("td", { class: "n" }, String(progress.by_person[name])),
      el("td", { class: "n" }, figure(kappa(name))),
      sided ? el("td", { class: "n" }, of(agreement.position[name])) : null,
      known ? rate(agreement.gold[name]) : null,
    ),
  );
  const heads = ["Name", " Answers", " Kappa with others", ...(sided ? [" Left side"] : []), ...(known ? [" Known answers"] : [])];
  return card("People", table(heads, rows));
}

function exports_(project) {
  const votes = el(
    "select",
    { "aria-label": "Which answers count", onchange: () => draw() },
    el("option", { value: "majority" }, "the majority of each task"),
    el("option", { value: "each" }, "every answer"),
  );
  const trains = aspects(project, true);
  if (trains.length > 1) trains.push(["each", "all questions, each in rows of its own (column criterion)"]);
  const on = picker("Question to export", trains, () => draw());
  const has = (project.kind.startsWith("rating") && project.overall) || project.strengths > 0 || project.questions.some(({ kind }) => kind === "scale");
  const margin = el("input", { type: "checkbox", onchange: () => draw() });
  const links = el("div", { class: "stack" });

  const link = (form, label, say) =>
    el(
      "div",
      { class: "file" },
      el(
        "button",
        {
          type: "button",
          onclick: () => download(`/api/label/export?project=${project.id}&form=${form}&votes=${votes.value}${form === "votes" ? "" : `&aspect=${encodeURIComponent(on.value)}`}${margin.checked && form === "preference" ? "&margin=true" : ""}`).catch((error) => notice(error.message)),
        },
        label,
      ),
      el("span", { class: "soft" }, say),
    );
  const out = ({ rows, left_out: left }) =>
    [`${rows} rows`, ...Object.entries(left).map(([why, n]) => `${n} left out: ${WHY[why] ?? why}`)].join(" · ");

  async function draw() {
    let found = null;
    try {
      if (trains.length) found = await get(`/api/label/left-out?project=${project.id}&votes=${votes.value}&aspect=${encodeURIComponent(on.value)}`);
    } catch (error) {
      notice(error.message);
    }
    links.replaceChildren(
      ...(trains.length ? [link("preference", "Preferences", found ? out(found.preference) : ""), link("unpaired", "Unpaired", found ? out(found.unpaired) : "")] : []),
      link("votes", "All votes", "all answers, also undone ones, with person, time and side"),
    );
  }

  draw();
  return card(
    "Export",
    el(
      "p",
      { class: "soft" },
      "JSONL for psigrad dpo, psigrad reward and KTO (TRL's columns). Each row names its votes, runs and rollouts.",
    ),
    el("div", { class: "row" }, ...(trains.length > 1 ? [on] : []), votes, has ? el("label", { class: "row" }, margin, "with margins") : null),
    links,
  );
}
