// The labelling page. The address names the open project and its open part.
import { get, post } from "../api.js";
import { $, el, notice } from "../dom.js";
import { read } from "../reading.js";
import { account } from "./account.js";
import { material } from "./material.js";
import { people } from "./people.js";
import { asks, projectForm } from "./projects.js";
import { results } from "./results.js";
import { done, loggedOut, Work } from "./work.js";

const PARTS = {
  work: ["Label", "label"],
  results: ["Results", "results"],
  material: ["Material", "manage"],
  people: ["People", "manage"],
  settings: ["Settings", "manage"],
};

let me = null, projects = [], working = null, turn = 0;

const address = (project, part) => `#project=${project}${part ? `&part=${part}` : ""}`;

/** Return the parts of a project that the user may open, the most useful one first. */
const parts = (project) => Object.keys(PARTS).filter((name) => project.may.includes(PARTS[name][1]));

async function draw() {
  const mine = ++turn;
  working?.close();
  working = null;
  const given = new URLSearchParams(location.hash.slice(1)), part = given.get("part");
  try {
    me ??= await get("/api/label/me");
    projects = await get("/api/label/projects");
  } catch (error) {
    show("Labelling", null, error.status === 401 ? loggedOut() : el("p", { class: "failure", role: "alert" }, error.message));
    return;
  }
  if (mine !== turn) return;
  $("who").textContent = me.owner ? "You own this studio" : `You are ${me.name}`;
  $("leave").hidden = me.owner;
  const project = projects.find((each) => each.id === Number(given.get("project")));
  if (part === "account") show("Your account", null, account(me, projects));
  else if (part === "new") show("New project", null, projectForm(null, (made) => { location.hash = address(made, "material"); }));
  else if (project) open(project, parts(project).includes(part) ? part : parts(project)[0]);
  else show("Labelling", null, home());
  document.documentElement.dataset.ready = "";
}

function show(title, project, ...content) {
  $("title").textContent = title;
  document.title = `${title} · psigrad`;
  $("tabs").hidden = $("asked").hidden = project === null;
  $("view").replaceChildren(...content);
}

function open(project, part) {
  const root = el("div", { class: `part ${part}` });
  show(project.name, project, root);
  $("asked").replaceChildren(...(part === "work" && project.instructions ? [read(project.instructions)] : []));
  $("asked").hidden = $("asked").textContent === "";
  const tabs = parts(project).map((name) => el("a", { href: address(project.id, name), "aria-current": name === part && "page" }, PARTS[name][0]));
  $("tabs").replaceChildren(el("a", { href: "#" }, "All projects"), ...tabs);
  if (part === "work" && project.closed) root.append(done("This project is closed", "It takes no more answers."));
  else if (part === "work") working = new Work(root, project);
  else if (part === "settings") root.append(projectForm(project, draw));
  else ({ results, material, people })[part](root, project, me);
}

function home() {
  const about = (project) =>
    [asks(project), project.overlap > 1 && `${project.overlap} people for each`, project.closed && "closed"].filter(Boolean).join(" · ");
  const list = el("ul", { class: "projects" }, ...projects.map((project) =>
    el("li", { class: "card" }, el("a", { href: address(project.id) }, el("h2", {}, project.name)), el("p", { class: "soft" }, about(project)))));
  const none = me.admin
    ? "No project yet. Create one, import completions, and label them, alone or with people you invite."
    : "You are in no project. Ask the person who invited you.";
  const make = me.admin && el("div", { class: "row" }, el("a", { class: "button primary", href: "#part=new" }, "New project"));
  return el("div", { class: "part home" }, projects.length ? list : el("p", { class: "soft" }, none), make);
}

$("account").addEventListener("click", () => { location.hash = "#part=account"; });
$("leave").addEventListener("click", async () => {
  try {
    await post("/api/join/logout", {});
    location.assign("/join");
  } catch (error) {
    notice(error.message);
  }
});
addEventListener("hashchange", draw);
draw();
