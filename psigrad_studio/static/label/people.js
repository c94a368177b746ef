// The members of a project, their roles, and links for new members.
import { get, post } from "../api.js";
import { button, el, notice, select } from "../dom.js";
import { asked, day, field, form, number, once, table } from "./forms.js";

const ROLES = { labeller: "labels", viewer: "sees results", admin: "labels and manages" };
const OPTIONS = Object.entries(ROLES).map(([role, does]) => [role, `${role}: ${does}`]);
const FAR = "The link works only on this machine. Others need an ssh tunnel to the same port, or a reverse proxy and --allow-host.";

/** Return the address for others: by the host name of --allow-host, or else this page's. */
const base = ({ outside }) => (outside.length && !outside.some((each) => new URL(each).host === location.host) ? outside[0] : location.origin);

/** Return true if this page's address works only on this machine. */
const local = ({ outside }) => ["127.0.0.1", "localhost"].includes(location.hostname) && !outside.length;

export async function people(root, project, me) {
  const link = el("div", {}), said = el("p", { class: "said", role: "status" }), lists = el("div", { class: "stack" });
  const role = select({ name: "role" }, OPTIONS);
  const studio = el("input", { type: "checkbox", onchange: () => { role.disabled = studio.checked; } });
  const invite = form(
    "Create a link",
    [
      el("h2", {}, "Invite"),
      el("p", { class: "soft" }, "One person can open a link once, to choose a name and a password."),
      field("Role", role),
      field("Valid for days", number("days", { value: 7, min: 1, max: 365, required: true })),
      me.admin && el("label", { class: "row" }, studio, "Administrator of all projects"),
    ],
    async (given) => {
      const { path } = await post("/api/label/invite", { ...given, ...(studio.checked ? { role: "admin" } : { project: project.id }) });
      link.replaceChildren(once("Send this link; it is shown only once:", base(me) + path));
      if (local(me)) link.append(el("p", { class: "soft small" }, FAR));
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
      const put = (given, then) => asked("/api/label/role", { project: project.id, user: one.id, role: given }, async () => { await draw(); then(); });
      const undo = () => put(one.role, () => { said.textContent = `${one.name} is ${one.role} again.`; });
      const onchange = () => put(change.value || null, () =>
        said.replaceChildren(`${one.name}: ${change.value || "removed from the project"}. `, button({ onclick: undo }, "Undo")));
      const change = select({ "aria-label": `Role of ${one.name}`, onchange }, [...OPTIONS, ["", "remove from the project"]], one.role);
      const open = me.admin && !one.disabled && one.name !== me.name;
      return [one.name, one.disabled ? "blocked" : change, open && button({ class: "quiet", onclick: () => shutOut(one) }, "Block")];
    });
    return el("section", { class: "card" }, el("h2", {}, "Members"), table(["Name", "Role", ""], rows));
  }

  function shutOut({ id, name }) {
    const dialog = el(
      "dialog",
      { class: "card", "aria-label": `Block ${name}`, onclose: () => dialog.remove() },
      el("p", {}, `${name} will be logged out of the entire studio and cannot log in again. Their answers stay.`),
      el("form", { class: "row", method: "dialog" },
        el("button", { class: "primary", onclick: () => asked("/api/label/disable", { id }, draw) }, "Block"),
        el("button", {}, "Cancel")),
    );
    root.append(dialog);
    dialog.showModal();
  }

  function pending(all) {
    if (!all.length) return el("p", { class: "soft" }, "No open links.");
    const revoke = (id) => button({ class: "quiet", onclick: () => asked("/api/label/uninvite", { id }, draw) }, "Revoke");
    const rows = all.map((one) => [one.role, `until ${day(one.expires_at)}`, revoke(one.id)]);
    return el("section", { class: "card" }, el("h2", {}, "Open links"), table(["Role", "Valid", ""], rows));
  }

  root.replaceChildren(said, el("div", { class: "columns" }, lists, invite));
  await draw().catch((error) => notice(error.message));
}
