// Who takes part in a project: members, their roles, and links for new ones.
import { get, post } from "../api.js";
import { el, notice } from "../dom.js";
import { field, form } from "./projects.js";

const ROLES = { labeller: "labels", viewer: "sees results", admin: "labels and manages" };
const options = (chosen) => Object.entries(ROLES).map(([role, does]) => el("option", { value: role, selected: role === chosen }, `${role}: ${does}`));
const day = (ms) => new Date(ms).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" });

/** A secret that is shown once, with a button that copies it. */
export function once(label, value) {
  const input = el("input", { type: "text", readonly: true, value, "aria-label": label, onfocus: () => input.select() });
  const copy = el(
    "button",
    {
      type: "button",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(value);
          notice("Copied.", 2);
        } catch {
          input.select();
          notice("Press Ctrl+C to copy the selected text.");
        }
      },
    },
    "Copy",
  );
  return el("div", { class: "once" }, el("p", {}, label), el("div", { class: "row" }, input, copy));
}

/** Where others reach the studio: by the name that it was given, else as this page does. */
const base = ({ outside }) => (outside.length && !outside.some((each) => new URL(each).host === location.host) ? outside[0] : location.origin);

function away({ outside }) {
  const here = ["127.0.0.1", "localhost"].includes(location.hostname) && !outside.length;
  return here
    ? el(
        "p",
        { class: "soft small" },
        "The address is this machine's. Others need an ssh tunnel to the same port, or a reverse proxy and --allow-host.",
      )
    : null;
}

/** Ask the studio and draw again; a refusal is said below. */
export async function asked(path, content, then) {
  try {
    await post(path, content);
    await then();
  } catch (error) {
    notice(error.message);
  }
}

export async function people(root, project, me) {
  const link = el("div", {}), said = el("p", { class: "said", role: "status" });
  const lists = el("div", { class: "stack" });
  const role = el("select", {}, ...options("labeller")),
    days = el("input", { type: "number", value: 7, min: 1, max: 365, step: 1, required: true });
  const studio = el("input", {
    type: "checkbox",
    onchange: () => {
      role.disabled = studio.checked;
    },
  });
  const invite = form(
    "Create a link",
    [
      el("h2", {}, "Invite"),
      el("p", { class: "soft" }, "One person can open a link once, to choose a name and a password."),
      field("Role", role),
      field("Valid for days", days),
      me.admin ? el("label", { class: "row" }, studio, "Administrator of all projects") : null,
    ],
    async () => {
      const body = studio.checked ? { role: "admin", days: Number(days.value) } : { project: project.id, role: role.value, days: Number(days.value) };
      const { path } = await post("/api/label/invite", body);
      link.replaceChildren(once("Send this link; it is shown only now:", base(me) + path), away(me) ?? "");
      await draw();
    },
  );
  invite.append(link);

  async function draw() {
    const found = await get(`/api/label/people?project=${project.id}`);
    lists.replaceChildren(members(found.members), pending(found.invites));
  }

  function members(all) {
    const rows = all.map((one) => {
      const change = el(
        "select",
        {
          "aria-label": `Role of ${one.name}`,
          onchange: () => {
            const put = (role, then) => asked("/api/label/role", { project: project.id, user: one.id, role }, async () => { await draw(); then(); });
            const undo = el("button", { type: "button", onclick: () => put(one.role, () => { said.textContent = `${one.name} is ${one.role} again.`; }) }, "Undo");
            put(change.value || null, () => said.replaceChildren(`${one.name}: ${change.value || "removed from the project"}. `, undo));
          },
        },
        ...options(one.role),
        el("option", { value: "" }, "remove from the project"),
      );
      const shut =
        me.admin && !one.disabled && one.name !== me.name
          ? el("button", { type: "button", class: "quiet", onclick: () => shutOut(one) }, "Block")
          : null;
      return el("tr", {}, el("th", { scope: "row" }, one.name), el("td", {}, one.disabled ? "blocked" : change), el("td", {}, shut));
    });
    return el("section", { class: "card" }, el("h2", {}, "Members"), table(["Name", "Role", ""], rows));
  }

  function shutOut(one) {
    const dialog = el(
      "dialog",
      { class: "card", "aria-label": `Block ${one.name}` },
      el("p", {}, `${one.name} is logged out of the whole studio and can't come back. Their answers stay.`),
      el(
        "div",
        { class: "row" },
        el(
          "button",
          {
            type: "button",
            class: "primary",
            onclick: () => {
              dialog.remove();
              asked("/api/label/disable", { id: one.id }, draw);
            },
          },
          "Block",
        ),
        el("button", { type: "button", onclick: () => dialog.remove() }, "Cancel"),
      ),
    );
    root.append(dialog);
    dialog.showModal();
  }

  function pending(all) {
    if (!all.length) return el("p", { class: "soft" }, "No open links.");
    const rows = all.map((one) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, one.role),
        el("td", {}, `until ${day(one.expires_at)}`),
        el("td", {}, el("button", { type: "button", class: "quiet", onclick: () => asked("/api/label/uninvite", { id: one.id }, draw) }, "Revoke")),
      ),
    );
    return el("section", { class: "card" }, el("h2", {}, "Open links"), table(["Role", "Good", ""], rows));
  }

  root.replaceChildren(said, el("div", { class: "columns" }, lists, invite));
  try {
    await draw();
  } catch (error) {
    notice(error.message);
  }
}

/** A table that scrolls by itself where it is too wide. A head that begins with a space is one of figures. */
export const table = (heads, rows) =>
  el(
    "div",
    {
      class: "wide",
      tabindex: "0",
      role: "group",
      "aria-label": `Table: ${heads
        .filter(Boolean)
        .map((head) => head.trim())
        .join(", ")}`,
    },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el("tr", {}, ...heads.map((head) => (head ? el("th", { scope: "col", class: head.startsWith(" ") && "n" }, head.trim()) : el("td", {})))),
      ),
      el("tbody", {}, ...rows),
    ),
  );
