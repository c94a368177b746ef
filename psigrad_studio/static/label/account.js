// One's own account: API tokens for programs, and the password.
import { get, post } from "../api.js";
import { el, notice } from "../dom.js";
import { asked, once, table } from "./people.js";
import { field, form } from "./projects.js";

const day = (ms) => (ms === null ? "" : new Date(ms).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" }));

export function account(me, projects) {
  const list = el("div", {}),
    made = el("div", {});
  const name = el("input", { type: "text", required: true, maxlength: 80, autocomplete: "off" });
  const role = el("select", {}, ...["labeller", "viewer", "admin"].map((each) => el("option", { value: each }, each)));
  const project = el(
    "select",
    {},
    el("option", { value: "" }, "all my projects"),
    ...projects.map((each) => el("option", { value: each.id }, each.name)),
  );
  const days = el("input", { type: "number", min: 1, max: 365, step: 1, placeholder: "no limit" });
  const token = form(
    "Create a token",
    [
      el("h2", {}, "API tokens"),
      el("p", { class: "soft" }, "For programs. They send the header Authorization: Bearer TOKEN and have the rights of the token's role."),
      list,
      field("Purpose", name),
      field("Role", role),
      field("Project", project),
      field("Valid for days", days),
    ],
    async () => {
      const body = {
        name: name.value,
        role: role.value,
        project: project.value ? Number(project.value) : null,
        days: days.value ? Number(days.value) : null,
      };
      const { token: value } = await post("/api/label/token", body);
      made.replaceChildren(once("Copy the token; it is shown only now:", value));
      await draw();
    },
  );
  token.append(made);

  async function draw() {
    const rows = (await get("/api/label/tokens")).map((one) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, one.name),
        el("td", {}, one.role),
        el("td", {}, one.revoked_at ? "revoked" : one.expires_at ? `until ${day(one.expires_at)}` : ""),
        el(
          "td",
          {},
          one.revoked_at
            ? null
            : el("button", { type: "button", class: "quiet", onclick: () => asked("/api/label/untoken", { id: one.id }, draw) }, "Revoke"),
        ),
      ),
    );
    list.replaceChildren(...(rows.length ? [table(["Token", "Role", "Valid", ""], rows)] : []));
  }

  draw().catch((error) => notice(error.message));
  return el(
    "div",
    { class: "part" },
    el("p", {}, el("a", { href: "#" }, "All projects")),
    el("div", { class: "columns" }, token, me.owner ? null : password(me)),
  );
}

function password(me) {
  const old = el("input", { type: "password", required: true, autocomplete: "current-password" });
  const fresh = el("input", { type: "password", required: true, minlength: 10, autocomplete: "new-password" });
  const user = el("input", { type: "text", value: me.name, autocomplete: "username", hidden: true, readonly: true });
  return form(
    "Change the password",
    [el("h2", {}, "Password"), user, field("Old password", old), field("New password", fresh, "10 characters or more. You log in again afterwards.")],
    async () => {
      await post("/api/label/password", { old: old.value, new: fresh.value });
      location.assign("/join");
    },
  );
}
