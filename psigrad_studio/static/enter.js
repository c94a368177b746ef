// Keeps the token of a session that has just begun, and goes to the first page. Storage belongs to this port, cookies to all of them.
import { keepSession } from "./api.js";

const meta = (name) => document.querySelector(`meta[name="${name}"]`).content;
try {
  keepSession(meta("csrf"));
  location.replace(meta("home"));
} catch {
  document.getElementById("said").textContent = "This browser blocks storage, which the studio needs for its session. Allow storage for this address.";
}
