// The parts of every page: the theme switch, and the link that skips the navigation.
import { $, svg } from "./dom.js";

const SUN = "M10 6a4 4 0 1 1 0 8 4 4 0 0 1 0-8zM9.2 1h1.6v3H9.2zM9.2 16h1.6v3H9.2zM1 9.200h3v1.6H1zM16 9.200h3v1.6h-3zM3.100 4.200l1.100-1.100 2.100 2.100-1.100 1.100zM13.700 14.800l1.100-1.100 2.100 2.100-1.100 1.100zM3.100 15.800l2.100-2.100 1.100 1.100-2.100 2.100zM13.700 5.200l2.100-2.100 1.100 1.100-2.100 2.100z";
const MOON = "M12.500 2.200a8 8 0 1 0 5.300 10.100A6.600 6.600 0 0 1 12.500 2.200z";
const button = $("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");

const current = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");

function label() {
  const other = current() === "dark" ? "light" : "dark", said = `Change to the ${other} theme`;
  button.replaceChildren(svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: other === "light" ? SUN : MOON })));
  button.setAttribute("aria-label", said);
  button.title = said;
}

button.addEventListener("click", () => {
  const next = current() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("psigrad-theme", next);
  label();
});
dark.addEventListener("change", label);
label();

// pages store their state in the fragment of the address, so the link must not change it
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});
