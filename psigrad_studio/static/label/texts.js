// What is shown of a prompt or a completion: strings, or conversations. Everything becomes text nodes.
import { el } from "../dom.js";

const NAMES = { system: "System", developer: "Developer", user: "User", assistant: "Assistant", tool: "Tool" };

/** A prompt: plain text, or its messages one after the other. */
export function prompt(content) {
  if (!Array.isArray(content)) return plain(content);
  return content.length === 1 && content[0].role === "user" ? message(content[0]) : conversation(content);
}

/** A completion. A single message of the assistant needs no name over it: all of them have that. */
export function completion(content) {
  if (!Array.isArray(content)) return plain(content);
  return content.length === 1 && content[0].role === "assistant" ? message(content[0]) : conversation(content);
}

function conversation(messages) {
  return el(
    "div",
    { class: "talk" },
    ...messages.map((each) => el("div", { class: "turn" }, el("span", { class: "role" }, NAMES[each.role] ?? String(each.role)), message(each))),
  );
}

function message({ content, tool_calls: calls, reasoning_content: thoughts }) {
  const parts = [];
  if (thoughts) parts.push(el("div", { class: "text soft" }, String(thoughts)));
  if (content !== undefined && content !== null && content !== "") parts.push(plain(content));
  for (const call of calls ?? []) parts.push(el("div", { class: "text mono" }, JSON.stringify(call.function ?? call)));
  return parts.length === 1 ? parts[0] : el("div", {}, ...parts);
}

function plain(content) {
  if (Array.isArray(content)) return el("div", {}, ...content.map((part) => plain(part?.type === "text" ? part.text : JSON.stringify(part))));
  const text = typeof content === "string" ? content : JSON.stringify(content);
  return text.trim() === "" ? el("div", { class: "text soft" }, "(only spaces)") : el("div", { class: "text" }, text);
}
