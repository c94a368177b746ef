// A small Llama by hand: forward, backward and AdamW on float32 arrays. All of them lie in one memory, where the products are
// made; a place is an index into its floats. A layer is
//     h += attention(norm(h)·qkv)·out;  h += (silu(gate)·up)·down with [gate | up] = norm(h)·mlp
import { fastGemm } from "./gemm.js";
import { FOR, stream, uniform } from "./random.js";

const EPSILON = 1e-6, THETA = 10000;
export const SHAPE = { layers: 2, width: 64, hidden: 192, heads: 4, vocabulary: 12, columns: 16 };

/** Every tensor as [name, rows, columns], in the order of their places. Products take columns in eights: those of the head beyond
 * the vocabulary stay 0. */
export function tensors({ layers, width, hidden, vocabulary, columns }) {
  const layer = (l) => [
    [`norm1.${l}`, 1, width], [`qkv.${l}`, width, 3 * width], [`out.${l}`, width, width],
    [`norm2.${l}`, 1, width], [`mlp.${l}`, width, 2 * hidden], [`down.${l}`, hidden, width],
  ];
  return [["embed", vocabulary, width], ...Array.from({ length: layers }, (_, l) => layer(l)).flat(), ["norm", 1, width], ["head", width, columns]];
}

export class Model {
  /** For at most `rows` texts of at most `longest` tokens. */
  constructor({ rows, longest, shape = SHAPE, gemm = fastGemm }) {
    const { layers, width, hidden, heads, columns } = shape, tokens = 4 * Math.ceil((rows * longest) / 4);
    Object.assign(this, { shape, longest, specs: tensors(shape) });
    let size = 0;
    const reserve = (count) => { size += 8 * Math.ceil(count / 8); return size - 8 * Math.ceil(count / 8); };
    this.offsets = new Map();
    this.size = this.specs.reduce((at, [name, r, c]) => { this.offsets.set(name, at); return at + r * c; }, 0);
    for (const bank of ["weights", "reference", "gradient", "turned"]) this[bank] = reserve(this.size);
    const layer = () => ({
      h: reserve(tokens * width), inverse1: reserve(tokens), x1: reserve(tokens * width), qkv: reserve(tokens * 3 * width),
      attention: reserve(tokens * heads * longest), context: reserve(tokens * width),
      middle: reserve(tokens * width), inverse2: reserve(tokens), x2: reserve(tokens * width),
      mlp: reserve(tokens * 2 * hidden), active: reserve(tokens * hidden),
    });
    this.saved = Array.from({ length: layers }, layer);
    this.last = { h: reserve(tokens * width), inverse: reserve(tokens), x: reserve(tokens * width), logits: reserve(tokens * columns) };
    this.cache = Array.from({ length: layers }, () => reserve(tokens * 3 * width));
    this.scratch = { h: reserve(tokens * width), wide: reserve(tokens * 2 * hidden), narrow: reserve(tokens * hidden), turned: reserve(tokens * hidden) };
    this.dlogits = reserve(tokens * columns);
    const memory = new WebAssembly.Memory({ initial: Math.ceil((4 * size) / 65536) });
    this.f = new Float32Array(memory.buffer);
    this.gemm = gemm(memory);
    this.slopes = new Float64Array(longest);
    [this.first, this.second, this.steps] = [new Float32Array(this.size), new Float32Array(this.size), 0];
    const half = width / heads / 2, angle = (s, i) => s * THETA ** (-i / half);
    const turns = (wave) => Float32Array.from({ length: longest * half }, (_, at) => wave(angle(Math.floor(at / half), at % half)));
    [this.cos, this.sin] = [turns(Math.cos), turns(Math.sin)];
  }

  /** Fresh weights: norms are 1, matrices uniform with a standard deviation of 1/√rows, the embedding's 1. */
  initialise(seed) {
    for (const [index, [name, rows, columns]] of this.specs.entries()) {
      const at = this.weights + this.offsets.get(name), from = stream(seed, FOR.weights, index);
      const wide = name === "embed" ? Math.sqrt(3) : Math.sqrt(3 / rows), used = name === "head" ? this.shape.vocabulary : columns;
      for (let r = 0; r < rows; r++)
        for (let c = 0; c < columns; c++)
          this.f[at + r * columns + c] = rows === 1 ? 1 : c < used ? wide * (2 * uniform(from, r * columns + c) - 1) : 0;
    }
    this.restart();
  }

  /** Forget the optimiser's moments. */
  restart() {
    this.first.fill(0);
    this.second.fill(0);
    this.steps = 0;
  }

  /** Keep today's policy as the reference. */
  freeze() {
    this.f.copyWithin(this.reference, this.weights, this.weights + this.size);
  }

  /** The reference becomes the policy again. */
  thaw() {
    this.f.copyWithin(this.weights, this.reference, this.reference + this.size);
  }

  place(bank, name) {
    return this[bank] + this.offsets.get(name);
  }

  /** c = a·b. */
  product(a, b, c, m, n, k) {
    const rows = 4 * Math.ceil(m / 4);
    this.f.fill(0, c, c + rows * n);
    this.gemm(a, b, c, rows, n, k);
  }

  /** x = w·h/√(mean(h²) + ε), and 1/√(…) at `inverse`. */
  norm(h, w, x, inverse, m) {
    const { f, shape: { width } } = this;
    for (let r = 0; r < m; r++) {
      const row = r * width;
      let squares = 0;
      for (let i = 0; i < width; i++) squares += f[h + row + i] ** 2;
      const by = (f[inverse + r] = 1 / Math.sqrt(squares / width + EPSILON));
      for (let i = 0; i < width; i++) f[x + row + i] = f[w + i] * f[h + row + i] * by;
    }
  }

  /** dh += the gradient of `norm`, dw += that of its weights. */
  normBack(h, w, inverse, dx, dh, dw, m) {
    const { f, shape: { width } } = this;
    for (let r = 0; r < m; r++) {
      const row = r * width, by = f[inverse + r];
      let along = 0;
      for (let i = 0; i < width; i++) along += f[dx + row + i] * f[w + i] * f[h + row + i];
      along *= (by * by) / width;
      for (let i = 0; i < width; i++) {
        f[dw + i] += f[dx + row + i] * f[h + row + i] * by;
        f[dh + row + i] += by * (f[dx + row + i] * f[w + i] - f[h + row + i] * along);
      }
    }
  }

  /** Turn queries and keys of a row by its position; `sign` −1 turns back. */
  rotate(row, position, sign) {
    const { f, shape: { width, heads } } = this, half = width / heads / 2;
    for (let head = 0; head < 2 * heads; head++) // queries, then keys
      for (let i = 0; i < half; i++) {
        const at = row + head * 2 * half + i, c = this.cos[position * half + i], s = sign * this.sin[position * half + i];
        const [x, y] = [f[at], f[at + half]];
        f[at] = x * c - y * s;
        f[at + half] = y * c + x * s;
      }
  }

  /** The context of one query row over `count` rows of keys and values from `keys` on; the weights stay at `weights`. */
  attend(query, keys, count, weights, context) {
    const { f, longest, shape: { width, heads } } = this, size = width / heads, scale = 1 / Math.sqrt(size);
    for (let head = 0; head < heads; head++) {
      const q = query + head * size, w = weights + head * longest, out = context + head * size;
      let most = -Infinity, sum = 0;
      for (let s = 0; s < count; s++) {
        const k = keys + s * 3 * width + width + head * size;
        let dot = 0;
        for (let i = 0; i < size; i++) dot += f[q + i] * f[k + i];
        f[w + s] = dot * scale;
        if (f[w + s] > most) most = f[w + s];
      }
      for (let s = 0; s < count; s++) sum += f[w + s] = Math.exp(f[w + s] - most);
      for (let i = 0; i < size; i++) f[out + i] = 0;
      for (let s = 0; s < count; s++) {
        const share = (f[w + s] /= sum), v = keys + s * 3 * width + 2 * width + head * size;
        for (let i = 0; i < size; i++) f[out + i] += share * f[v + i];
      }
    }
  }

  /** Gradients of `attend`, added to the rows of queries, keys and values at `d…`. */
  attendBack(query, keys, count, weights, dContext, dQuery, dKeys) {
    const { f, longest, slopes, shape: { width, heads } } = this, size = width / heads, scale = 1 / Math.sqrt(size);
    for (let head = 0; head < heads; head++) {
      const own = head * size, w = weights + head * longest, out = dContext + own;
      let mean = 0;
      for (let s = 0; s < count; s++) {
        const v = s * 3 * width + 2 * width + own, share = f[w + s];
        let dot = 0;
        for (let i = 0; i < size; i++) {
          dot += f[out + i] * f[keys + v + i];
          f[dKeys + v + i] += share * f[out + i];
        }
        slopes[s] = dot;
        mean += share * dot;
      }
      for (let s = 0; s < count; s++) {
        const k = s * 3 * width + width + own, d = f[w + s] * (slopes[s] - mean) * scale;
        for (let i = 0; i < size; i++) {
          f[dQuery + own + i] += d * f[keys + k + i];
          f[dKeys + k + i] += d * f[query + own + i];
        }
      }
    }
  }

  /** A layer on m rows whose stream is at saved.h; `attention` fills the contexts from what is at saved.qkv. The stream goes on at `next`. */
  layer(bank, l, m, next, attention) {
    const { f, shape: { width, hidden } } = this, s = this.saved[l], w = (name) => this.place(bank, `${name}.${l}`);
    this.norm(s.h, w("norm1"), s.x1, s.inverse1, m);
    this.product(s.x1, w("qkv"), s.qkv, m, 3 * width, width);
    attention(s);
    this.product(s.context, w("out"), s.middle, m, width, width);
    for (let i = 0; i < m * width; i++) f[s.middle + i] += f[s.h + i];
    this.norm(s.middle, w("norm2"), s.x2, s.inverse2, m);
    this.product(s.x2, w("mlp"), s.mlp, m, 2 * hidden, width);
    for (let r = 0; r < m; r++)
      for (let i = 0; i < hidden; i++) {
        const gate = f[s.mlp + r * 2 * hidden + i];
        f[s.active + r * hidden + i] = (gate / (1 + Math.exp(-gate))) * f[s.mlp + r * 2 * hidden + hidden + i];
      }
    this.product(s.active, w("down"), next, m, width, hidden);
    for (let i = 0; i < m * width; i++) f[next + i] += f[s.middle + i];
  }

  /** The stream before a layer, or after the last one. */
  after(l) {
    return l < this.shape.layers ? this.saved[l].h : this.last.h;
  }

  start(bank, tokens, m) {
    const { f, shape: { width } } = this, embed = this.place(bank, "embed"), h = this.after(0);
    for (let r = 0; r < m; r++) f.copyWithin(h + r * width, embed + tokens[r] * width, embed + (tokens[r] + 1) * width);
  }

  finish(bank, m) {
    const { last, shape: { width, columns } } = this;
    this.norm(last.h, this.place(bank, "norm"), last.x, last.inverse, m);
    this.product(last.x, this.place(bank, "head"), last.logits, m, columns, width);
  }

  /** The logits after each of `count` texts of `length` tokens: row b·length + t of last.logits. */
  forward(bank, tokens, count, length) {
    const { width, heads, layers } = this.shape, m = count * length;
    this.start(bank, tokens, m);
    for (let l = 0; l < layers; l++)
      this.layer(bank, l, m, this.after(l + 1), (s) => {
        for (let r = 0; r < m; r++) this.rotate(s.qkv + r * 3 * width, r % length, 1);
        for (let r = 0; r < m; r++)
          this.attend(s.qkv + r * 3 * width, s.qkv + (r - (r % length)) * 3 * width, (r % length) + 1, s.attention + r * heads * this.longest, s.context + r * width);
      });
    this.finish(bank, m);
  }

  /** The logits of position `t` of each text, whose earlier tokens have been given by calls before; row b of last.logits. */
  next(bank, tokens, count, t) {
    const { f, longest, shape: { width, layers } } = this;
    this.start(bank, tokens, count);
    for (let l = 0; l < layers; l++)
      this.layer(bank, l, count, this.after(l + 1), (s) => {
        for (let b = 0; b < count; b++) {
          const row = s.qkv + b * 3 * width, keys = this.cache[l] + b * longest * 3 * width;
          this.rotate(row, t, 1);
          f.copyWithin(keys + t * 3 * width, row, row + 3 * width);
          this.attend(row, keys, t + 1, s.attention, s.context + b * width);
        }
      });
    this.finish(bank, count);
  }

  /** The policy's gradient from the gradient of its logits at `dlogits`, after `forward` on the same texts. */
  backward(tokens, count, length) {
    const { f, last, scratch, shape: { width, hidden, heads, layers, columns } } = this, m = count * length;
    f.fill(0, this.gradient, this.gradient + this.size);
    this.turnWeights();
    const w = (name) => this.place("weights", name), g = (name) => this.place("gradient", name), turned = (name) => this.place("turned", name);
    this.weightGradient(last.x, this.dlogits, g("head"), m, width, columns);
    this.product(this.dlogits, turned("head"), scratch.narrow, m, width, columns);
    const dh = scratch.h;
    f.fill(0, dh, dh + m * width);
    this.normBack(last.h, w("norm"), last.inverse, scratch.narrow, dh, g("norm"), m);
    for (let l = layers - 1; l >= 0; l--) {
      const s = this.saved[l], of = (name) => `${name}.${l}`;
      this.weightGradient(s.active, dh, g(of("down")), m, hidden, width);
      this.product(dh, turned(of("down")), scratch.narrow, m, hidden, width);
      for (let r = 0; r < m; r++)
        for (let i = 0; i < hidden; i++) {
          const at = r * 2 * hidden + i, gate = f[s.mlp + at], on = 1 / (1 + Math.exp(-gate)), d = f[scratch.narrow + r * hidden + i];
          f[scratch.wide + at] = d * f[s.mlp + at + hidden] * on * (1 + gate * (1 - on));
          f[scratch.wide + at + hidden] = d * gate * on;
        }
      this.weightGradient(s.x2, scratch.wide, g(of("mlp")), m, width, 2 * hidden);
      this.product(scratch.wide, turned(of("mlp")), scratch.narrow, m, width, 2 * hidden);
      this.normBack(s.middle, w(of("norm2")), s.inverse2, scratch.narrow, dh, g(of("norm2")), m);
      this.weightGradient(s.context, dh, g(of("out")), m, width, width);
      this.product(dh, turned(of("out")), scratch.narrow, m, width, width);
      f.fill(0, scratch.wide, scratch.wide + m * 3 * width);
      for (let r = 0; r < m; r++) {
        const row = r * 3 * width, first = (r - (r % length)) * 3 * width;
        this.attendBack(s.qkv + row, s.qkv + first, (r % length) + 1, s.attention + r * heads * this.longest, scratch.narrow + r * width, scratch.wide + row, scratch.wide + first);
      }
      for (let r = 0; r < m; r++) this.rotate(scratch.wide + r * 3 * width, r % length, -1);
      this.weightGradient(s.x1, scratch.wide, g(of("qkv")), m, width, 3 * width);
      this.product(scratch.wide, turned(of("qkv")), scratch.narrow, m, width, 3 * width);
      this.normBack(s.h, w(of("norm1")), s.inverse1, scratch.narrow, dh, g(of("norm1")), m);
    }
    const embed = g("embed");
    for (let r = 0; r < m; r++)
      for (let i = 0; i < width; i++) f[embed + tokens[r] * width + i] += f[dh + r * width + i];
  }

  /** out += xᵀ·d. */
  weightGradient(x, d, out, m, rows, columns) {
    this.turn(x, this.scratch.turned, m, rows);
    this.gemm(this.scratch.turned, d, out, rows, columns, m);
  }

  turn(from, to, rows, columns) {
    const { f } = this;
    for (let c = 0; c < columns; c++)
      for (let r = 0; r < rows; r++) f[to + c * rows + r] = f[from + r * columns + c];
  }

  turnWeights() {
    for (const [name, rows, columns] of this.specs) if (rows > 1) this.turn(this.place("weights", name), this.place("turned", name), rows, columns);
  }

  /** AdamW along the gradient, scaled down to a norm of 1 where it is longer; decay acts on matrices. Returns the norm. */
  step(rate, { beta1 = 0.9, beta2 = 0.99, decay = 0, epsilon = 1e-5 } = {}) {
    const { f, first, second, gradient, weights } = this;
    let squares = 0;
    for (let i = 0; i < this.size; i++) squares += f[gradient + i] ** 2;
    const norm = Math.sqrt(squares), shrink = norm > 1 ? 1 / norm : 1;
    this.steps += 1;
    const size = rate / (1 - beta1 ** this.steps), scale = 1 / Math.sqrt(1 - beta2 ** this.steps);
    for (const [name, rows, columns] of this.specs) {
      const from = this.offsets.get(name), keep = rows > 1 ? 1 - rate * decay : 1;
      for (let i = from; i < from + rows * columns; i++) {
        const slope = shrink * f[gradient + i];
        first[i] += (1 - beta1) * (slope - first[i]);
        second[i] = beta2 * second[i] + (1 - beta2) * slope * slope;
        f[weights + i] = keep * f[weights + i] - (size * first[i]) / (scale * Math.sqrt(second[i]) + epsilon);
      }
    }
    return norm;
  }
}
