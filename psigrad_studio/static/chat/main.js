// The chat page: a conversation with one model, or with two whose names are hidden until the user chooses.
import { events, get, post } from "../api.js";
import { $, button, el, notice } from "../dom.js";
import { choose as chooseReading, chosen as chosenReading } from "../reading.js";
import { Exchange } from "./exchange.js";

const CHOICES = { 1: "left", 2: "right", 3: "tie", 4: "both_bad" };

const exchanges = []; // all exchanges on the page
const talk = []; // the conversation so far: { role, content }
let abilities = { template: true, system: false };
let writing = null; // the running answer: { exchange, id, abort }
let open = null; // the comparison that waits for a choice

const comparing = () => $("compare").checked;
const chosen = () => [$("first").value, ...(comparing() ? [$("second").value] : [])];
const named = (select) => select.selectedOptions[0]?.textContent ?? "";
const say = (text) => { $("status").textContent = text; };

// ---- models

const { models } = await get("/api/chat/models");
for (const select of [$("first"), $("second")]) {
  const groups = new Map();
  for (const { id, name, run } of models) {
    if (run !== null && !groups.has(run)) groups.set(run, el("optgroup", { label: run }));
    (groups.get(run) ?? select).append(new Option(name, id));
  }
  select.append(...groups.values());
}
// preselect the models of the two most recent runs
const finals = models.filter(({ run, step }) => run !== null && step === null);
const byAge = [...(finals.length > 1 ? finals : models)].sort((a, b) => b.written - a.written);
$("first").value = byAge[0]?.id ?? "";
$("second").value = (byAge[1] ?? byAge[0])?.id ?? "";

/** Look up the models' abilities; of two models, only those that both have. */
async function look() {
  const ids = chosen();
  if (models.length === 0) return;
  try {
    const found = await Promise.all([...new Set(ids)].map((model) => post("/api/chat/about", { model })));
    if (ids.join() !== chosen().join()) return;
    abilities = { template: found.every((each) => each.template), system: found.every((each) => each.system) };
    const mixed = found.some((each) => each.template !== found[0].template);
    $("system-field").hidden = !abilities.system;
    $("manner").textContent = mixed
      ? "Only one of these models has a chat template, so they read different texts and your choice will not be stored."
      : abilities.template ? "" : "No chat template: the model continues your text and does not see earlier messages.";
  } catch (error) {
    notice(error.message);
  }
}

// ---- asking

function settings() {
  const seed = $("seed").value.trim();
  return {
    temperature: Number($("temperature").value),
    top_p: Number($("topP").value),
    max_tokens: Number($("tokens").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
    system: abilities.system ? $("system").value : "",
  };
}

async function send() {
  const content = $("message").value;
  if (writing || open || content === "") return;
  for (const field of [$("tokens"), $("seed")]) if (!field.reportValidity()) return;
  const names = comparing() ? null : named($("first"));
  const exchange = new Exchange(content, names);
  exchanges.push(exchange);
  $("log").append(exchange.node);
  $("nothing").hidden = true;
  $("message").value = "";
  writing = { exchange, id: null, abort: new AbortController() };
  draw();
  exchange.node.scrollIntoView({ block: "end" });
  const question = { models: chosen(), messages: [...talk, { role: "user", content }], ...settings() };
  try {
    for await (const event of events("/api/chat/answer", question, writing.abort.signal)) happened(exchange, event);
    if (!exchange.ended) exchange.fail("The studio stopped in the middle of the answer.");
  } catch (error) {
    exchange.fail(error.message);
  }
  writing = null;
  finish(exchange, content);
}

function happened(exchange, event) {
  const moves = {
    begun: () => { writing.id = event.writing; exchange.duel = event.duel; },
    waiting: () => say(event.ahead === 1 ? "Waiting for 1 other answer." : `Waiting for ${event.ahead} other answers.`),
    loading: () => say(comparing() ? "Loading the models …" : "Loading the model …"),
    writing: () => say("Writing …"),
    text: () => exchange.add(event.side, event.text),
    written: () => exchange.end(event),
    failed: () => exchange.fail(event.message),
  };
  moves[event.event]?.();
}

function finish(exchange, content) {
  if (exchange.failed) {
    say("There is no answer.");
    $("message").value ||= content;
  } else if (exchange.duel) {
    open = exchange;
    exchange.ask(choose, skip);
    say("Both answers are complete. Which one is better?");
  } else {
    keep(exchange, 0);
    say("The answer has ended.");
  }
  draw();
  // do not interrupt typing; focus the group and not one of its buttons, which Enter would press
  if (document.activeElement === $("message") && $("message").value !== "") return;
  if (open) exchange.choices.focus({ preventScroll: true });
  else $("message").focus();
}

function keep(exchange, side) {
  talk.push({ role: "user", content: exchange.content }, { role: "assistant", content: exchange.texts[side] });
}

async function stop() {
  if (writing === null) return;
  if (writing.id === null) writing.abort.abort();
  else await post("/api/chat/stop", { writing: writing.id }).catch((error) => notice(error.message));
}

// ---- choosing

async function choose(choice) {
  const exchange = open;
  if (exchange === null) return;
  open = null;
  exchange.choices.setAttribute("aria-busy", "true");
  try {
    exchange.reveal(await post("/api/chat/choose", { duel: exchange.duel, choice }), () => takeBack(exchange));
    // after a tie the conversation continues with the left answer; two bad answers are not part of it
    if (choice !== "both_bad") keep(exchange, choice === "right" ? 1 : 0);
    say(exchange.stored ? "Stored." : "Not stored.");
  } catch (error) {
    open = exchange;
    notice(error.message);
  }
  exchange.choices.removeAttribute("aria-busy");
  draw();
  if (open === null) $("message").focus();
}

async function takeBack(exchange) {
  try {
    await post("/api/chat/undo", { duel: exchange.duel });
    exchange.leave("Choice undone. It is not stored.");
    say("Undone.");
    $("message").focus();
  } catch (error) {
    notice(error.message);
  }
}

function skip() {
  const exchange = open;
  open = null;
  exchange.leave("Skipped: not stored, and not part of the conversation.", () => {
    if (open || writing) return notice("Finish the question below first.");
    open = exchange;
    exchange.node.classList.remove("out");
    exchange.ask(choose, skip);
    exchange.choices.focus({ preventScroll: true });
    say("Which answer is better?");
    draw();
  });
  say("Skipped.");
  draw();
  $("message").focus();
}

/** Start a new conversation. The previous one can be restored until the first message. */
function fresh() {
  if (writing) stop();
  const was = { open, talk: [...talk], exchanges: [...exchanges], nodes: [...$("log").childNodes] };
  function restore() {
    open = was.open;
    talk.push(...was.talk);
    exchanges.push(...was.exchanges);
    $("log").replaceChildren(...was.nodes);
    $("nothing").hidden = true;
    say("The conversation is restored.");
    draw();
    $("message").focus();
  }
  open = null;
  talk.length = exchanges.length = 0;
  $("log").replaceChildren();
  $("nothing").replaceChildren(...(was.nodes.length ? ["A new conversation. ", button({ class: "quiet", onclick: restore }, "Undo")] : ["No messages yet."]));
  $("nothing").hidden = false;
  say("");
  draw();
  $("message").focus();
}

// ---- the page

function draw() {
  const busy = writing !== null || open !== null;
  $("send").disabled = busy || models.length === 0;
  $("stop").hidden = writing === null;
  $("second-field").hidden = !comparing();
  $("first-name").textContent = comparing() ? "First model" : "Model";
  for (const id of ["first", "second", "compare", "fresh"]) $(id).disabled = writing !== null;
  for (const id of ["temperature", "topP"]) {
    document.querySelector(`output[for="${id}"]`).textContent = Number($(id).value).toFixed(2);
  }
}

$("send").addEventListener("click", send);
$("stop").addEventListener("click", stop);
$("fresh").addEventListener("click", fresh);
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  const typing = event.target.closest("input, textarea, select");
  if (!open || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in CHOICES) choose(CHOICES[event.key]);
  if (event.key.toLowerCase() === "d") open.differ();
});
$("written").checked = chosenReading() === "written";
$("written").addEventListener("change", () => {
  chooseReading($("written").checked ? "written" : "rendered");
  for (const exchange of exchanges) exchange.again();
});
for (const id of ["first", "second", "compare"]) $(id).addEventListener("change", () => { draw(); look(); });
for (const id of ["temperature", "topP"]) $(id).addEventListener("input", draw);

if (models.length === 0) $("nothing").textContent = "There is no model in the runs folder yet. Train one with psigrad demo, or start the studio with --checkpoint FOLDER.";
draw();
look();
document.documentElement.dataset.ready = "true";
