// How pages are ranked by a search: the settings come first where they have the words, guides before chapters of the course and tests' names.
const PLACES = [["settings", 20], ["warnings", 8], ["course/", -3], ["api/", -2]];
var Scorer = {
  score: ([page, title, anchor, description, score]) => score + PLACES.reduce((sum, [place, more]) => (page.startsWith(place) ? sum + more : sum), 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
