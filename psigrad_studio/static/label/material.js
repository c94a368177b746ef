// Import of completions into a project: from a JSONL file, the rollouts of a run, or by sampling.
import { get, pause, post } from "../api.js";
import { button, el, notice, select } from "../dom.js";
import { field, form, number, text, tick } from "./forms.js";

const QUIET = 1500;
const CHECKS = "Use as attention checks, because chosen is known to be better than rejected. They are mixed in and never exported; Results shows each person's share of right answers";
const UNSURE = "Pairs with nearly equal rewards teach a reward model most, so they come first. One pair in ten stays at a random place. After the next training, score the rows again (psigrad score), import them, and press this button again.";

export async function material(root, project, me) {
  const said = el("p", { class: "said", role: "status" });
  const columns = el("div", { class: "columns" }, fromFile(project, said), project.kind === "pair" && byDoubt(project, said));
  root.replaceChildren(said, columns);
  if (!me.admin) return;
  columns.append(await fromRun(project, said));
  columns.append(await fromModel(project, said));
}

/** Return the card that sorts pairs so that those about which a reward model is least sure come first. */
const byDoubt = (project, said) => form(
  "Ask these first",
  [el("h2", {}, "Most uncertain first"), el("p", { class: "soft" }, UNSURE)],
  async () => {
    const { pairs } = await post("/api/label/order", { project: project.id });
    said.textContent = `${many(pairs, "pair")} sorted; pairs that somebody has started keep their places.`;
  },
  { class: "card lines last" },
);

/** Return the fields that set how many tasks are created. */
const making = (project) => el(
  "div",
  { class: "pairs" },
  field("Prompts, at most", number("making.prompts", { min: 1, placeholder: "all" }), "Drawn at random."),
  field(`${project.kind.startsWith("rating") ? "Completions" : "Tasks"} of each prompt, at most`, number("making.per_prompt", { min: 1, placeholder: "all" })),
  project.kind === "ranking" && field("Completions in one ranking", number("making.ranked", { min: 2, max: 12, value: 5 })),
  field("People who answer each task", number("making.overlap", { min: 1, placeholder: project.overlap })),
);
const shuffle = () => tick("making.shuffle", "In random order", true);

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

/** Report an import, with a button that undoes it. */
function told(said, project, added, name) {
  async function undo() {
    try {
      const { tasks, begun } = await post("/api/label/withdraw", { project: project.id, since: added.since, until: added.until });
      said.textContent = `${many(tasks, "task")} removed${begun ? `; ${begun} remain because somebody has started them` : ""}.`;
    } catch (error) {
      notice(error.message);
    }
  }
  said.replaceChildren(report(added, name), ...(added.tasks ? [" ", button({ onclick: undo }, "Undo")] : []));
}

function fromFile(project, said) {
  const file = el("input", { type: "file", accept: ".jsonl,.ndjson,.json,.txt", required: true });
  return form(
    "Import the file",
    [
      el("h2", {}, "A file"),
      el("p", { class: "soft" }, "JSONL. Each line has prompt, and completion, completions, or chosen and rejected, as strings or lists of messages."),
      field("File", file),
      field("Sampler", text("sampler", { maxlength: 200 }), "The origin of rows without a column sampler or samplers. Labellers never see it."),
      making(project),
      shuffle(),
      project.kind === "pair" && tick("making.gold", CHECKS),
    ],
    async ({ sampler, ...given }) => {
      const [chosen] = file.files, body = { text: await chosen.text(), name: chosen.name.slice(0, 200), sampler: sampler || null };
      told(said, project, await post("/api/label/import", { project: project.id, ...given, ...body }), chosen.name);
    },
  );
}

/** Return the list of choices; an empty one if the request is refused. */
const offered = (path) => get(path).catch(() => []);
const nothing = (title, why) => el("section", { class: "card lines" }, el("h2", {}, title), el("p", { class: "soft" }, why));

async function fromRun(project, said) {
  const runs = await offered("/api/label/runs");
  if (!runs.length) return nothing("A run", "No run with rollouts is in the runs folder.");
  return form(
    "Import the run",
    [
      el("h2", {}, "A run"),
      field("Run", select({ name: "run" }, runs.map((name) => [name, name]))),
      field("Rollouts", select({ name: "kind" }, [["train", "of training"], ["eval", "of evaluations"], ["", "all"]])),
      el("div", { class: "pairs" },
        field("From step", number("first", { min: 0, placeholder: "first" })), field("To step", number("last", { min: 0, placeholder: "last" }))),
      tick("across_steps", "Compare completions of different steps, too"),
      making(project),
      shuffle(),
    ],
    async (given) => {
      told(said, project, await post("/api/label/import-run", { project: project.id, ...given, kind: given.kind || null }), given.run);
    },
  );
}

async function fromModel(project, said) {
  const models = await offered("/api/label/models");
  if (!models.length) return nothing("A model", "No language model is in the runs folder.");
  const stop = button({ hidden: true, onclick: () => post("/api/label/unsample", {}) }, "Stop");
  const node = form(
    "Sample and import",
    [
      el("h2", {}, "A model"),
      field("Model", select({ name: "model" }, models.map(({ id, name }) => [id, name]))),
      field("Prompts", el("textarea", { name: "prompts", rows: 4, required: true }), "One per line, or JSONL with prompt."),
      tick("chat", "Each line is a user message"),
      el("div", { class: "pairs" },
        field("Completions of each", number("completions", { min: 1, max: 64, value: 4, required: true })),
        field("Temperature", number("temperature", { min: 0, max: 5, value: 1, step: 0.05, required: true })),
        field("Maximum tokens", number("max_tokens", { min: 1, max: 8192, value: 256, required: true }))),
      making(project),
    ],
    async (given) => watch(await post("/api/label/sample", { project: project.id, ...given })),
  );

  async function watch(job) {
    stop.hidden = false;
    while (job?.state === "sampling") {
      said.textContent = `Sampling ${job.model} on ${job.prompts} prompts …`;
      await pause(QUIET);
      job = await get("/api/label/sampling");
    }
    stop.hidden = true;
    if (job.state === "failed") throw new Error(job.said);
    said.textContent = job.state === "stopped" ? "Import cancelled. No rows were added." : report(job.added, job.model);
  }

  node.lastElementChild.append(stop);
  get("/api/label/sampling")
    .then((job) => job?.state === "sampling" && job.project === project.id && watch(job))
    .catch(() => {});
  return node;
}
