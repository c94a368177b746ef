// Join by an invite link, or log in. The invite's token is after the #, and is removed from the address bar at once.
import { keepSession, post } from "../api.js";
import { $ } from "../dom.js";

const token = location.hash.slice(1);
// proves that this browser was logged in before, so that guesses from elsewhere do not lock its user out
const DEVICE = "psigrad-device";
const ROLES = { labeller: "to label in", viewer: "to see the results of", admin: "to manage" };
history.replaceState(null, "", location.pathname);

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = text === "";
}

function asForm(title, said, button, fresh) {
  $("title").textContent = title;
  $("said").textContent = said;
  $("go").textContent = button;
  $("rule").hidden = !fresh;
  $("password").autocomplete = fresh ? "new-password" : "current-password";
  if (fresh) $("password").minLength = 10;
  $("enter").hidden = false;
  $("name").focus();
}

const logIn = (said) => asForm("Log in", said, "Log in", false);

async function start() {
  if (!token) return logIn("With the name and the password that you chose when you were invited.");
  let offer;
  try {
    offer = await post("/api/join/look", { token });
  } catch (error) {
    return logIn(`${error.message} If you have been here before, log in.`);
  }
  const what = offer.project === null ? "to be an administrator of this studio" : `${ROLES[offer.role]} “${offer.project}”`;
  if (offer.owner) {
    $("said").textContent =
      `This link invites somebody ${what}. This browser already has the studio's own key. Send the link to that person, or open it in a private window.`;
  } else if (offer.name !== null) {
    $("said").textContent = `You are invited ${what}.`;
    $("use").textContent = `Join as ${offer.name}`;
    $("other").hidden = false;
  } else {
    asForm("Join", `You are invited ${what}.`, "Join", true);
  }
}

$("enter").addEventListener("submit", async (event) => {
  event.preventDefault();
  trouble("");
  $("go").disabled = true;
  const who = { name: $("name").value, password: $("password").value };
  try {
    const again = { ...who, device: localStorage.getItem(DEVICE) ?? "" };
    const { csrf, device } = $("rule").hidden ? await post("/api/join/login", again) : await post("/api/join/accept", { token, ...who });
    localStorage.setItem(DEVICE, device);
    keepSession(csrf);
    location.assign("/label");
  } catch (error) {
    trouble(error.message);
    $("go").disabled = false;
  }
});

$("use").addEventListener("click", async () => {
  try {
    await post("/api/join/use", { token });
    location.assign("/label");
  } catch (error) {
    $("said").textContent = error.message;
  }
});

start().finally(() => {
  document.documentElement.dataset.ready = "";
});
