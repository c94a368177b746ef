// Words for the strength of a preference.
const WORDS = {
  2: ["slightly", "clearly"],
  3: ["slightly", "clearly", "by far"],
  4: ["barely", "slightly", "clearly", "by far"],
  5: ["barely", "slightly", "clearly", "much", "by far"],
};

/** Return the word for a strength out of `of` grades. */
export const GRADES = (strength, of) => WORDS[of]?.[strength - 1] ?? String(strength);
