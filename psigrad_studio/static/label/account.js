// The user's account: API tokens for programs, and the password.
import { get, post } from "../api.js";
import { button, el, notice, select } from "../dom.js";
import { asked, day, field, form, number, once, table, text } from "./forms.js";

export function account(me, projects) {
  const list = el("div", {}), made = el("div", {});
  const token = form(
    "Create a token",
    [
      el("h2", {}, "API tokens"),
      el("p", { class: "soft" }, "For programs. They send the header Authorization: Bearer TOKEN and have the rights of the token's role."),
      list,
      field("Purpose", text("name", { required: true, maxlength: 80 })),
      field("Role", select({ name: "role" }, ["labeller", "viewer", "admin"].map((role) => [role, role]))),
      field("Project", select({ name: "project" }, [["", "all my projects"], ...projects.map(({ id, name }) => [id, name])])),
      field("Valid for days", number("days", { min: 1, max: 365, placeholder: "no limit" })),
    ],
    async (given) => {
      const { token: value } = await post("/api/label/token", { ...given, project: Number(given.project) || null });
      made.replaceChildren(once("Copy the token; it is shown only once:", value));
      await draw();
    },
  );
  token.append(made);

  async function draw() {
    const rows = (await get("/api/label/tokens")).map(({ id, name, role, revoked_at: revoked, expires_at: expires }) => [
      name,
      role,
      revoked ? "revoked" : expires && `until ${day(expires)}`,
      !revoked && button({ class: "quiet", onclick: () => asked("/api/label/untoken", { id }, draw) }, "Revoke"),
    ]);
    list.replaceChildren(...(rows.length ? [table(["Token", "Role", "Valid", ""], rows)] : []));
  }

  draw().catch((error) => notice(error.message));
  const columns = el("div", { class: "columns" }, token, !me.owner && password(me));
  return el("div", { class: "part" }, el("p", {}, el("a", { href: "#" }, "All projects")), columns);
}

function password(me) {
  const secret = (name, attributes) => el("input", { type: "password", name, required: true, ...attributes });
  return form(
    "Change the password",
    [
      el("h2", {}, "Password"),
      el("input", { type: "text", value: me.name, autocomplete: "username", hidden: true, readonly: true }),
      field("Old password", secret("old", { autocomplete: "current-password" })),
      field("New password", secret("new", { minlength: 10, autocomplete: "new-password" }), "10 characters or more. You log in again afterwards."),
    ],
    async (given) => {
      await post("/api/label/password", given);
      location.assign("/join");
    },
  );
}
