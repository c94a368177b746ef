// The display of prompts and completions, which are strings or conversations.
import { el } from "../dom.js";
import { compared, read } from "../reading.js";

const NAMES = { system: "System", developer: "Developer", user: "User", assistant: "Assistant", tool: "Tool" };

/** Return a prompt or a completion as text or messages. A single message of the `usual` role has no name above it. */
const content = (given, reading, usual) => {
  if (!Array.isArray(given)) return text(given, reading);
  return given.length === 1 && given[0].role === usual ? message(given[0], reading) : conversation(given, reading);
};
export const prompt = (given, reading) => content(given, reading, "user");
export const completion = (given, reading) => content(given, reading, "assistant");

/** Return a completion as written, with the words marked that `other` lacks. */
export const difference = (given, other) => compared(flat(given), flat(other));

function conversation(messages, reading) {
  const turn = (each) => el("div", { class: "turn" }, el("span", { class: "role" }, NAMES[each.role] ?? String(each.role)), message(each, reading));
  return el("div", { class: "talk" }, ...messages.map(turn));
}

function message({ content, tool_calls: calls, reasoning_content: thoughts }, reading) {
  const parts = [];
  if (thoughts) parts.push(el("div", { class: "text soft" }, String(thoughts)));
  if (content !== undefined && content !== null && content !== "") parts.push(text(content, reading));
  for (const call of calls ?? []) parts.push(el("div", { class: "text mono" }, JSON.stringify(call.function ?? call)));
  return parts.length === 1 ? parts[0] : el("div", {}, ...parts);
}

function text(content, reading) {
  if (Array.isArray(content)) return el("div", {}, ...content.map((part) => text(partial(part), reading)));
  const words = typeof content === "string" ? content : JSON.stringify(content);
  return words.trim() === "" ? el("div", { class: "text soft" }, "(only spaces)") : read(words, reading);
}

const partial = (part) => (part?.type === "text" ? part.text : JSON.stringify(part));

/** Return a completion as plain text, for comparison. */
function flat(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content);
  const said = ({ role, content: words, tool_calls: calls, reasoning_content: thoughts }) => {
    const whole = typeof words === "string" ? words : Array.isArray(words) ? words.map(partial).join("\n") : words ? JSON.stringify(words) : "";
    const parts = [thoughts, whole, ...(calls ?? []).map((call) => JSON.stringify(call.function ?? call))];
    return `${content.length > 1 ? `${NAMES[role] ?? role}: ` : ""}${parts.filter(Boolean).join("\n")}`;
  };
  return content.map(said).join("\n\n");
}
