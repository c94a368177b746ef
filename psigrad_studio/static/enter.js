// Store the token of a new session, and go to the first page. Local storage belongs to this port, cookies to all ports of the host.
import { keepSession } from "./api.js";

const meta = (name) => document.querySelector(`meta[name="${name}"]`).content;
try {
  keepSession(meta("csrf"));
  location.replace(meta("home"));
} catch {
  document.getElementById("said").textContent = "This browser blocks storage, which the studio needs for its session. Allow storage for this address.";
}
