// Set the theme before the first paint: the user's last choice, or the system's.
"use strict";
try {
  const chosen = localStorage.getItem("psigrad-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage may be closed to us; then the system's theme it is */ }
