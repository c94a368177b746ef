// How pages are ranked by a search. The name of a setting, in any spelling, leads to the settings. Otherwise a page comes first whose
// title has the words, and first of all a heading that equals them; guides come before chapters of the course, and those before the reference.
const asked = () => (new URLSearchParams(location.search).get("q") || "").toLowerCase().trim();
const isSetting = (words) => {
  if (words.includes("_") || words.startsWith("--")) return true; // to which the page of settings answers only if it has the words
  const name = words.replace(/[-\s]+/g, "_");
  const classes = Object.entries(Search._index.objects).filter(([holder]) => holder.startsWith("psigrad.config."));
  return classes.some(([, members]) => members.some((member) => member[4] === name));
};
const shareInTitle = (words, title) => {
  const all = words.split(/\s+/);
  return all.filter((word) => title.toLowerCase().includes(word)).length / all.length;
};
const PLACES = [["families", 3], ["debugging", 2], ["first_grpo", 1], ["course/", -3], ["api/", -2]];
var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const words = asked();
    const place = PLACES.reduce((sum, [place, more]) => (page.startsWith(place) ? sum + more : sum), 0);
    const heading = page !== "index" && title.split(" > ").pop().toLowerCase() === words ? 50 : 0;
    return score + place + heading + (page === "settings" && isSetting(words) ? 40 : 0) + 20 * shareInTitle(words, title.split(" > ").pop()) ** 2;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
