// What a search led to is marked, and a page opens at the row of the setting that was asked for. Sphinx marks nothing by itself:
// it takes every page for the search page, since the theme has a search on each.
document.addEventListener("DOMContentLoaded", () => {
  if (document.getElementById("search-results")) return;
  SphinxHighlight.highlightSearchWords();
  setTimeout(() => {
    const row = location.hash ? null : document.querySelector("td:first-child .highlighted");
    if (row) row.scrollIntoView({ block: "center" });
  }, 50); // it marks 10 ms later
});
