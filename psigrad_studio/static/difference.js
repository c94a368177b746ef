// The difference of two texts by words: a longest common subsequence, by dynamic programming between their equal ends.
const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
/** The most cells of the table. Two texts that need more count as different between their equal ends. */
const MOST = 6_000_000;

/** Return `text` in parts {words, own}; own words are missing in `other`. The common words are the same for both orders. */
export function differing(text, other) {
  const turned = text > other; // if there are several longest subsequences, choose the same one for both orders
  const [a, b] = (turned ? [other, text] : [text, other]).map((each) => each.match(WORDS) ?? []);
  const own = aligned(a, b);
  return turned ? parts(b, own[1]) : parts(a, own[0]);
}

/** Return, for each word of two lists, true if it is not common to both. */
function aligned(a, b) {
  const own = [Array(a.length).fill(true), Array(b.length).fill(true)];
  const common = (i, j) => { own[0][i] = own[1][j] = false; };
  let first = 0, last = 0;
  while (first < a.length && first < b.length && a[first] === b[first]) common(first, first++);
  while (last < a.length - first && last < b.length - first && a.at(-1 - last) === b.at(-1 - last)) common(a.length - 1 - last, b.length - 1 - last++);
  for (const [i, j] of subsequence(a.slice(first, a.length - last), b.slice(first, b.length - last))) common(first + i, first + j);
  return own;
}

/** Return the pairs of indices of a longest common subsequence. */
function subsequence(a, b) {
  const n = a.length, m = b.length, width = m + 1, found = [];
  if (n * m === 0 || n * m > MOST) return found;
  // length[i, j] of the longest common subsequence of a from i on and b from j on
  const length = new Uint16Array((n + 1) * width);
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) {
      const at = i * width + j;
      length[at] = a[i] === b[j] ? length[at + width + 1] + 1 : Math.max(length[at + width], length[at + 1]);
    }
  }
  for (let i = 0, j = 0; i < n && j < m;) {
    const at = i * width + j;
    if (a[i] === b[j]) found.push([i++, j++]);
    else if (length[at + width] >= length[at + 1]) i++;
    else j++;
  }
  return found;
}

function parts(words, own) {
  const found = [];
  words.forEach((word, i) => {
    // blanks between two own words count as own too
    const mine = own[i] || (!/\S/.test(word) && own[i - 1] === true && own[i + 1] === true);
    if (found.length && found.at(-1).own === mine) found.at(-1).words += word;
    else found.push({ words: word, own: mine });
  });
  return found;
}
