// Bring completions into a project: a JSONL file, or the rollouts of a run.
import { get, post } from "../api.js";
import { el, notice } from "../dom.js";
import { field, form } from "./projects.js";

const whole = (input) => (input.value === "" ? null : Number(input.value));
const number = (min, placeholder) => el("input", { type: "number", min, step: 1, placeholder });

export function material(root, project, me) {
  const said = el("p", { class: "said", role: "status" });
  const file = fromFile(project, said);
  root.replaceChildren(said, el("div", { class: "columns" }, ...[file, project.kind === "pair" ? byDoubt(project, said) : null].filter(Boolean)));
  if (!me.admin) return;
  fromRun(project, said)
    .then((made) => root.lastElementChild.append(made))
    .then(() => fromModel(project, said))
    .then((made) => root.lastElementChild.append(made));
}

/** The pairs that a reward model is least sure of come first. */
const byDoubt = (project, said) => form(
  "Ask these first",
  [
    el("h2", {}, "Most uncertain first"),
    el("p", { class: "soft" }, "Pairs with nearly equal rewards teach a reward model most, so they come first. One pair in ten stays at a random place. After the next training, score the rows again (psigrad score), import them, and press this button again."),
  ],
  async () => {
    const { pairs } = await post("/api/label/order", { project: project.id });
    said.textContent = `${many(pairs, "pair")} sorted; pairs that somebody has started keep their places.`;
  },
  { class: "card lines last" },
);

/** How tasks are made, as fields and as what is sent. */
function making(project) {
  const prompts = number(1, "all"),
    each = number(1, "all"),
    overlap = number(1, project.overlap),
    shuffle = el("input", { type: "checkbox", checked: true });
  const ranked = el("input", { type: "number", min: 2, max: 12, value: 5, step: 1 });
  const gold = el("input", { type: "checkbox" });
  const lines = [
    el(
      "div",
      { class: "pairs" },
      field("Prompts, at most", prompts, "Drawn at random."),
      field(project.kind.startsWith("rating") ? "Completions of each prompt, at most" : "Tasks of each prompt, at most", each),
      project.kind === "ranking" ? field("Completions in one ranking", ranked) : null,
      field("People who answer each task", overlap),
    ),
    el("label", { class: "row" }, shuffle, "In random order"),
  ];
  const sent = () => ({
    prompts: whole(prompts),
    per_prompt: whole(each),
    overlap: whole(overlap),
    shuffle: shuffle.checked,
    ranked: Number(ranked.value),
    gold: gold.checked,
  });
  return { lines, sent, gold: el("label", { class: "row" }, gold, "Use as attention checks, because chosen is known to be better than rejected. They are mixed in and never exported; Results shows each person's share of right answers") };
}

const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function report({ since, until, ...added }, name) {
  if (Object.values(added).every((count) => count === 0)) return `${name} is empty.`;
  const parts = [`${many(added.tasks, "new task")} from ${many(added.prompts, "new prompt")} and ${many(added.completions, "new completion")}`];
  if (added.checks) parts.push(`of them, attention checks: ${added.checks}`);
  if (added.known) parts.push(`already imported: ${many(added.known, "task")}`);
  if (added.repeated) parts.push(`same text as another completion of the prompt: ${many(added.repeated, "completion")}`);
  if (added.alone) parts.push(`nothing to compare: ${many(added.alone, "prompt")}`);
  if (added.unusable) parts.push(`empty or damaged: ${many(added.unusable, "completion")}`);
  return `${name}: ${parts.join("; ")}.`;
}

/** What was brought in, and a way to take it out again. */
function told(said, project, added, name) {
  const undo = el("button", { type: "button", onclick: async () => {
    try {
      const { tasks, begun } = await post("/api/label/withdraw", { project: project.id, since: added.since, until: added.until });
      said.textContent = `${many(tasks, "task")} removed${begun ? `; ${begun} remain because somebody has started them` : ""}.`;
    } catch (error) {
      notice(error.message);
    }
  } }, "Undo");
  said.replaceChildren(report(added, name), ...(added.tasks ? [" ", undo] : []));
}

function fromFile(project, said) {
  const made = making(project);
  const file = el("input", { type: "file", accept: ".jsonl,.ndjson,.json,.txt", required: true });
  const sampler = el("input", { type: "text", maxlength: 200, autocomplete: "off" });
  return form(
    "Import the file",
    [
      el("h2", {}, "A file"),
      el("p", { class: "soft" }, "JSONL. Each line has prompt, and completion, completions, or chosen and rejected, as strings or lists of messages."),
      field("File", file),
      field("Sampler", sampler, "The origin of rows without a column sampler or samplers. Labellers never see it."),
      ...made.lines,
      project.kind === "pair" ? made.gold : null,
    ],
    async () => {
      const [chosen] = file.files;
      const body = {
        project: project.id,
        text: await chosen.text(),
        name: chosen.name.slice(0, 200),
        sampler: sampler.value || null,
        making: made.sent(),
      };
      told(said, project, await post("/api/label/import", body), chosen.name);
    },
  );
}

async function fromRun(project, said) {
  let names = [];
  try {
    names = await get("/api/label/runs");
  } catch {
    /* then there is nothing to choose from */
  }
  if (!names.length)
    return el("section", { class: "card lines" }, el("h2", {}, "A run"), el("p", { class: "soft" }, "No run with rollouts is in the runs folder."));
  const made = making(project);
  const run = el("select", {}, ...names.map((name) => el("option", { value: name }, name)));
  const kind = el(
    "select",
    {},
    el("option", { value: "train" }, "of training"),
    el("option", { value: "eval" }, "of evaluations"),
    el("option", { value: "" }, "all"),
  );
  const first = number(0, "first"),
    last = number(0, "last"),
    across = el("input", { type: "checkbox" });
  return form(
    "Import the run",
    [
      el("h2", {}, "A run"),
      field("Run", run),
      field("Rollouts", kind),
      el("div", { class: "pairs" }, field("From step", first), field("To step", last)),
      el("label", { class: "row" }, across, "Compare completions of different steps, too"),
      ...made.lines,
    ],
    async () => {
      const body = {
        project: project.id,
        run: run.value,
        kind: kind.value || null,
        first: whole(first),
        last: whole(last),
        across_steps: across.checked,
        making: made.sent(),
      };
      told(said, project, await post("/api/label/import-run", body), run.value);
    },
  );
}

const QUIET = 1500;

async function fromModel(project, said) {
  let models = [];
  try {
    models = await get("/api/label/models");
  } catch {
    /* then there is nothing to choose from */
  }
  if (!models.length)
    return el("section", { class: "card lines" }, el("h2", {}, "A model"), el("p", { class: "soft" }, "No language model is in the runs folder."));
  const made = making(project);
  const model = el("select", {}, ...models.map(({ id, name }) => el("option", { value: id }, name)));
  const prompts = el("textarea", { rows: 4, required: true });
  const chat = el("input", { type: "checkbox" });
  const each = el("input", { type: "number", min: 1, max: 64, value: 4, step: 1, required: true });
  const temperature = el("input", { type: "number", min: 0, max: 5, value: 1, step: 0.05, required: true });
  const tokens = el("input", { type: "number", min: 1, max: 8192, value: 256, step: 1, required: true });
  const stop = el("button", { type: "button", hidden: true, onclick: () => post("/api/label/unsample", {}) }, "Stop");
  const node = form(
    "Sample and import",
    [
      el("h2", {}, "A model"),
      field("Model", model),
      field("Prompts", prompts, "One per line, or JSONL with prompt."),
      el("label", { class: "row" }, chat, "Each line is a user message"),
      el("div", { class: "pairs" }, field("Completions of each", each), field("Temperature", temperature), field("Maximum tokens", tokens)),
      ...made.lines.slice(0, 1),
    ],
    async () => {
      const body = {
        project: project.id,
        model: model.value,
        prompts: prompts.value,
        chat: chat.checked,
        completions: Number(each.value),
        temperature: Number(temperature.value),
        max_tokens: Number(tokens.value),
        making: made.sent(),
      };
      await watch(await post("/api/label/sample", body));
    },
  );

  async function watch(job) {
    stop.hidden = false;
    while (job?.state === "sampling") {
      said.textContent = `Sampling ${job.model} on ${job.prompts} prompts …`;
      await new Promise((resolve) => setTimeout(resolve, QUIET));
      job = await get("/api/label/sampling");
    }
    stop.hidden = true;
    if (job.state === "failed") throw new Error(job.said);
    said.textContent = job.state === "stopped" ? "Import cancelled. No rows were added." : report(job.added, job.model);
  }

  node.lastElementChild.append(stop);
  get("/api/label/sampling")
    .then((job) => (job?.state === "sampling" && job.project === project.id ? watch(job) : null))
    .catch(() => {});
  return node;
}
