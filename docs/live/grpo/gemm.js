// C += A·B for row-major float32 matrices: once in plain JavaScript, once as WebAssembly with vectors of four, written here
// instruction by instruction. Both add in the same order, so both give the same bits.

/** In a memory's floats: A [m,k] at `a`, B [k,n] at `b`, C [m,n] at `c`, places counted in floats. */
export function plainGemm(memory) {
  const f = new Float32Array(memory.buffer), { fround } = Math;
  return (a, b, c, m, n, k) => {
    for (let i = 0; i < m; i++)
      for (let p = 0; p < k; p++) {
        const x = f[a + i * k + p], row = b + p * n, out = c + i * n;
        for (let j = 0; j < n; j++) f[out + j] = fround(f[out + j] + fround(x * f[row + j]));
      }
  };
}

const I32 = 0x7f, V128 = 0x7b, VOID = 0x40;
const LOOP = 0x03, END = 0x0b, BR_IF = 0x0d, LT_U = 0x49, ADD = 0x6a, MUL = 0x6c;

/** LEB128, as every number of the format is written. */
function leb(value) {
  const out = [];
  do {
    out.push((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
    value >>>= 7;
  } while (value);
  return out;
}
const get = (local) => [0x20, ...leb(local)], set = (local) => [0x21, ...leb(local)];
const i32 = (value) => [0x41, value];
const simd = (code, ...rest) => [0xfd, ...leb(code), ...rest];
const load = (offset) => simd(0x00, 2, ...leb(offset)), splat = () => simd(0x09, 2, 0), store = (offset) => simd(0x0b, 2, ...leb(offset));
const mul = simd(0xe6), add = simd(0xe4);
const section = (id, ...parts) => { const body = parts.flat(Infinity); return [id, ...leb(body.length), ...body]; };
const text = (word) => [word.length, ...new TextEncoder().encode(word)];

/** The module: for four rows and eight columns at a time, eight vectors of sums stay in registers while p runs. */
function assembled() {
  const [a, b, c, m, n, k, i, j, p, at, nBytes, kBytes] = Array.from({ length: 12 }, (_, index) => index);
  const rows = [12, 13, 14, 15], left = 16, right = 17, x = 18, sum = (row, half) => 19 + 2 * row + half;
  const bump = (local, by) => [get(local), by, ADD, set(local)];
  const four = [0, 1, 2, 3], halves = [0, 1];
  const overC = (what) => [
    get(c), get(i), get(n), MUL, get(j), ADD, i32(4), MUL, ADD, set(at),
    four.map((row) => [what(row), bump(at, get(nBytes))]),
  ];
  const code = [
    get(n), i32(4), MUL, set(nBytes), get(k), i32(4), MUL, set(kBytes),
    LOOP, VOID, i32(0), set(j),
      LOOP, VOID,
        overC((row) => halves.map((half) => [get(at), load(16 * half), set(sum(row, half))])),
        get(a), get(i), get(kBytes), MUL, ADD, set(rows[0]),
        [1, 2, 3].map((row) => [get(rows[row - 1]), get(kBytes), ADD, set(rows[row])]),
        get(b), get(j), i32(4), MUL, ADD, set(at), i32(0), set(p),
        LOOP, VOID,
          get(at), load(0), set(left), get(at), load(16), set(right),
          four.map((row) => [
            get(rows[row]), splat(), set(x), bump(rows[row], i32(4)),
            halves.map((half) => [get(sum(row, half)), get(x), get(half ? right : left), mul, add, set(sum(row, half))]),
          ]),
          bump(at, get(nBytes)), bump(p, i32(1)),
        get(p), get(k), LT_U, BR_IF, 0, END,
        overC((row) => halves.map((half) => [get(at), get(sum(row, half)), store(16 * half)])),
        bump(j, i32(8)),
      get(j), get(n), LT_U, BR_IF, 0, END,
      bump(i, i32(4)),
    get(i), get(m), LT_U, BR_IF, 0, END,
    END,
  ].flat(Infinity);
  const locals = [2, 10, I32, 11, V128], body = [...locals, ...code];
  return new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, 1, 0x60, 6, Array(6).fill(I32), 0),
    ...section(2, 1, text("m"), text("m"), 2, 0, 1),
    ...section(3, 1, 0),
    ...section(7, 1, text("gemm"), 0, 0),
    ...section(10, 1, leb(body.length), body),
  ]);
}

/** The same by vectors; m must be a multiple of 4, n of 8. */
export function vectorGemm(memory) {
  const { gemm } = new WebAssembly.Instance(new WebAssembly.Module(assembled()), { m: { m: memory } }).exports;
  return (a, b, c, m, n, k) => gemm(4 * a, 4 * b, 4 * c, m, n, k);
}

/** The fastest that this browser has. */
export function fastGemm(memory) {
  try {
    return vectorGemm(memory);
  } catch { // no vectors, or no WebAssembly where a page may not compile
    return plainGemm(memory);
  }
}
