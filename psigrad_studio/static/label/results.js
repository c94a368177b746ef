// Results of a project: progress, agreement, position bias, ranking, people; and exports.
import { download, get } from "../api.js";
import { button, el, notice, select } from "../dom.js";
import { table } from "./forms.js";
import { intervals } from "./intervals.js";

const share = (x) => (x === null || x === undefined ? "–" : `${Math.round(x * 100)} %`);
const figure = (x) => (x === null || x === undefined ? "–" : x.toFixed(2).replace("-", "−"));
const BY = { sampler: "by sampler", run: "by run", step: "by run and step", completion: "by single completion" };
const VOTES = { majority: "the majority of each task", each: "every answer" };
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

/** Return the questions that can be shown alone, as [name, label]. The first is shown at the start. */
function aspects(project, train = false) {
  const own = project.questions.filter(({ kind }) => kind === "better" || kind === "scale" || (kind === "choice" && !train)).map(({ name }) => [name, name]);
  const weighed = project.questions.filter(({ kind, weight }) => (kind === "better" || kind === "scale") && weight > 0).length > 1;
  return [...(project.overall ? [["", own.length ? "overall" : ""]] : []), ...own, ...(weighed ? [["weighted", "weighted"]] : [])];
}

export async function results(root, project) {
  const asked = aspects(project);
  const by = select({ "aria-label": "Rank by", onchange: draw }, Object.entries(BY)), on = select({ "aria-label": "Question", onchange: draw }, asked);
  const waiting = el("p", { class: "soft", role: "status" }, "Counting …");
  const body = el("div", { class: "stack" }, waiting);
  root.replaceChildren(body, exports_(project));

  async function draw() {
    try {
      const found = await get(`/api/label/results?project=${project.id}&by=${by.value}&aspect=${encodeURIComponent(on.value)}`);
      const { agreement: agreed } = found;
      body.replaceChildren(...[
        done(found.progress),
        asked.length > 1 && each(found.aspects, on),
        el("div", { class: "columns" }, agreed && agreement(agreed), agreed && position(agreed.position[""])),
        ranking(found.ranking, by),
        agreed && people(found),
      ].filter(Boolean));
    } catch (error) {
      if (!waiting.isConnected) notice(error.message);
      else body.replaceChildren(el("p", { class: "failure", role: "alert" }, error.message));
    }
  }

  await draw();
}

const card = (title, ...content) => el("section", { class: "card stack" }, el("h2", {}, title), ...content);
const tile = (value, label, say) => el("div", { class: "tile" }, el("strong", {}, value), el("span", {}, label), say && el("small", { class: "soft" }, say));

function done({ tasks, wanted, answered, leased, skipped }) {
  const bar = el("progress", { max: Math.max(1, wanted), value: answered, "aria-label": "Received answers" });
  const says = [`${tasks} ${tasks === 1 ? "task" : "tasks"}`, leased && `${leased} being answered`, skipped && `${skipped} skipped`];
  const more = el("span", { class: "soft" }, says.filter(Boolean).join(" · "));
  return card("Progress", el("p", {}, el("strong", {}, `${answered} of ${wanted}`), " answers received. ", more), bar);
}

/** Return a table of all questions. The cards below show one of them. */
function each(found, on) {
  const rows = Object.entries(found).map(([name, { percent, alpha, shared }]) => {
    const best = alpha.ordinal ?? alpha.nominal;
    const interval = best.value === null ? "–" : `${figure(best.low)} to ${figure(best.high)}`;
    return [name || "overall", share(percent), figure(best.value), interval, shared];
  });
  return card("By question", table(["Question", " Equal answers", " Alpha", " 95 %", " Shared"], rows), el("label", { class: "row" }, "Below: ", on));
}

function agreement({ units, shared, percent, alpha, fleiss, cohen, gold }) {
  const best = alpha.ordinal ?? alpha.nominal, ordinal = alpha.ordinal ? ", ordinal" : "";
  const interval = best.value === null ? "of" : `${figure(best.low)} to ${figure(best.high)},`;
  const rows = cohen.filter((pair) => pair.units > 0).map((pair) => [`${pair.first} and ${pair.second}`, figure(pair.value), pair.units]);
  return card(
    "Agreement",
    !shared && el("p", { class: "soft" }, `${units} units are answered, none of them by two people yet.`),
    el("div", { class: "tiles" },
      tile(share(percent), "equal answers", `pairs of answers to one of ${shared} shared units`),
      tile(figure(best.value), `Krippendorff's alpha${ordinal}`, `${interval} ${best.units} units`),
      fleiss !== null && tile(figure(fleiss), "Fleiss' kappa"),
      gold[""] && tile(share(gold[""].value), "known answers right", `${gold[""].n} given`)),
    rows.length > 0 && el("details", {}, el("summary", {}, "Cohen's kappa of each pair of people"), table(["People", " Kappa", " Units"], rows)),
  );
}

function position(all) {
  if (!all) return null;
  const { p_value: p } = all, odd = p !== null && p < 0.05;
  const chance = p === null ? "–" : p < 0.001 ? "below 0.001" : p.toFixed(3);
  const left = `the left side was chosen in ${share(all.value)} of ${all.n} decisions (95 %: ${share(all.low)} to ${share(all.high)}).`;
  return card(
    "Position bias",
    el("p", {}, el("strong", { class: odd && "failure" }, odd ? "Possible: " : "No sign of it: "), left),
    el("p", { class: "soft" }, `Sides are drawn at random, so one half is expected; p = ${chance} (exact binomial test).`),
  );
}

function ranking(found, by) {
  const head = el("div", { class: "row between" }, el("h2", {}, "Ranking"), by);
  if (found.why) return el("section", { class: "card stack" }, head, el("p", { class: "soft" }, found.why));
  const ranks = ({ best_rank: best, worst_rank: worst }) => (best === worst ? best : `${best}–${worst}`);
  const rows = found.places.map((place, i) => [
    i + 1,
    place.name,
    figure(place.strength),
    el("span", { class: "soft" }, `${figure(place.low)} to ${figure(place.high)}`),
    ranks(place),
    place.comparisons,
  ]);
  const notes = [
    `Bradley–Terry strengths from ${found.comparisons} comparisons, with 95 % intervals; a difference of 1 means odds of 2.7 to 1.`,
    found.prior_sd !== null && `One entry never lost or never won, so a weak prior (standard deviation ${found.prior_sd}) limits the strengths.`,
    found.same > 0 && `${found.same} comparisons within one entry are left out.`,
    found.shared > 0 && `${found.shared} comparisons of a text with several origins are left out.`,
    found.competitors > found.places.length && `The best ${found.places.length} of ${found.competitors} are shown.`,
  ];
  return el(
    "section",
    { class: "card stack" },
    head,
    intervals(found.places.slice(0, 20)),
    table([" ", "Name", " Strength", " 95 %", " Rank", " Comparisons"], rows),
    el("p", { class: "soft small" }, notes.filter(Boolean).join(" ")),
  );
}

function people({ progress, agreement: { cohen, position: sides, gold } }) {
  const names = Object.keys(progress.by_person);
  if (!names.length) return null;
  const kappa = (name) => {
    const mine = cohen.filter((pair) => (pair.first === name || pair.second === name) && pair.value !== null);
    const units = mine.reduce((n, pair) => n + pair.units, 0);
    return units ? mine.reduce((sum, pair) => sum + pair.value * pair.units, 0) / units : null;
  };
  const of = (found) => (found ? `${share(found.value)} of ${found.n}` : "–");
  const rate = (found) => {
    if (!found) return "–";
    const guessing = found.n >= 8 && found.low <= 0.5;
    return el("span", { class: guessing && "failure" }, `${of(found)} (${share(found.low)} to ${share(found.high)})${guessing ? ": could be guessing" : ""}`);
  };
  const sided = Object.keys(sides).length > 0, known = Object.keys(gold).length > 0;
  const rows = names.map((name) =>
    [name, progress.by_person[name], figure(kappa(name)), ...(sided ? [of(sides[name])] : []), ...(known ? [rate(gold[name])] : [])]);
  return card("People", table(["Name", " Answers", " Kappa with others", ...(sided ? [" Left side"] : []), ...(known ? [" Known answers"] : [])], rows));
}

function exports_(project) {
  const trains = aspects(project, true);
  if (trains.length > 1) trains.push(["each", "all questions, each in separate rows (column criterion)"]);
  const votes = select({ "aria-label": "Which answers count", onchange: draw }, Object.entries(VOTES));
  const on = select({ "aria-label": "Question to export", onchange: draw }, trains);
  const has = (project.kind.startsWith("rating") && project.overall) || project.strengths > 0 || project.questions.some(({ kind }) => kind === "scale");
  const margin = el("input", { type: "checkbox" });
  const links = el("div", { class: "stack" });
  const query = (aspect = on.value) => `project=${project.id}&votes=${votes.value}&aspect=${encodeURIComponent(aspect)}`;

  function link(form, label, say) {
    const path = () => `/api/label/export?form=${form}&margin=${margin.checked && form === "preference"}&${query(form === "votes" ? "" : on.value)}`;
    const onclick = () => download(path()).catch((error) => notice(error.message));
    return el("div", { class: "file" }, button({ onclick }, label), el("span", { class: "soft" }, say));
  }

  const out = ({ rows, left_out: left }) => [`${rows} rows`, ...Object.entries(left).map(([why, n]) => `${n} left out: ${WHY[why] ?? why}`)].join(" · ");

  async function draw() {
    let found = null;
    try {
      if (trains.length) found = await get(`/api/label/left-out?${query()}`);
    } catch (error) {
      notice(error.message);
    }
    const made = [["preference", "Preferences"], ["unpaired", "Unpaired"]].map(([form, label]) => link(form, label, found ? out(found[form]) : ""));
    links.replaceChildren(...(trains.length ? made : []), link("votes", "All votes", "all answers, including undone ones, with person, time and side"));
  }

  draw();
  return card(
    "Export",
    el("p", { class: "soft" }, "JSONL for psigrad dpo, psigrad reward and KTO (TRL's columns). Each row names its votes, runs and rollouts."),
    el("div", { class: "row" }, trains.length > 1 && on, votes, has && el("label", { class: "row" }, margin, "with margins")),
    links,
  );
}
