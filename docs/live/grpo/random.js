// Randomness without a state: every number is a function of a stream and a counter. It is SplitMix64 at a place of its stream, bit
// for bit `psigrad.seeds.uniform`.
const MASK = (1n << 64n) - 1n;

/** A number in [0, 1) with 53 random bits. */
export function uniform(stream, counter) {
  let x = (stream + BigInt(counter + 1) * 0x9e3779b97f4a7c15n) & MASK;
  x = ((x ^ (x >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  x = ((x ^ (x >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return Number((x ^ (x >> 31n)) >> 11n) * 2 ** -53;
}

/** What each stream is for; its number goes into the stream. */
export const FOR = { weights: 0, demonstrations: 1, care: 2, prompts: 3, completions: 4, heldOut: 5, evaluation: 6 };

/** The stream of a purpose and an index below 2^40. */
export const stream = (seed, purpose, index) => (BigInt(seed) << 48n) | (BigInt(purpose) << 40n) | BigInt(index);
