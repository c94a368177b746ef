// What every page has: the theme switch, and the way past the navigation.
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");

const current = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");

function label() {
  button.textContent = current() === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", `Change to the ${current() === "dark" ? "light" : "dark"} theme`);
}

button.addEventListener("click", () => {
  const next = current() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("psigrad-theme", next);
  } catch { /* it holds for this page only */ }
  label();
});
dark.addEventListener("change", label);
label();

// the fragment of an address is the page's own, so the link must not write there
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
