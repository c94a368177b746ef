// Supervised fine-tuning and GRPO (arXiv:2402.03300) of the small model, one step a call.
import { Model, SHAPE } from "./model.js";
import { FOR, stream, uniform } from "./random.js";
import { END, LONGEST, PROMPT, REWARDS, answer, demonstrated, isRight, prompt, written } from "./task.js";

const COMPLETIONS = 128, DEMONSTRATIONS = 64, EXAM = 256;
const LENGTH = PROMPT + LONGEST - 1, V = SHAPE.vocabulary, FURTHEST = 20;

export const SETTINGS = { group: 8, clip: 0.2, kl: 0, reward: "right", passes: 2, rate: 5e-4, wrong: 0.6, tuningRate: 3e-3, warmup: 20 };

export class Learner {
  constructor(seed = 0, gemm = undefined) {
    Object.assign(this, { seed, tuned: 0, steps: 0, exams: 0 });
    this.model = new Model({ rows: EXAM, longest: LENGTH, gemm });
    this.model.initialise(seed);
    this.parameters = this.model.size - (SHAPE.columns - V) * SHAPE.width;
    this.logp = new Float64Array(V);
  }

  /** log π of every token after a row of logits, into this.logp. */
  logSoftmax(row) {
    const { f, last } = this.model, at = last.logits + row * SHAPE.columns, { logp } = this;
    let most = -Infinity, sum = 0;
    for (let v = 0; v < V; v++) most = Math.max(most, f[at + v]);
    for (let v = 0; v < V; v++) sum += Math.exp(f[at + v] - most);
    for (let v = 0; v < V; v++) logp[v] = f[at + v] - most - Math.log(sum);
    return logp;
  }

  /** Prompts with their completions as rows of one length, the last token of each left out: nothing follows it. */
  rows(prompts, completions) {
    const length = PROMPT - 1 + Math.max(...completions.map((given) => given.length));
    const tokens = new Int32Array(prompts.length * length).fill(END);
    for (const [b, given] of completions.entries()) tokens.set([...prompts[b], ...given].slice(0, PROMPT + given.length - 1), b * length);
    return { tokens, length };
  }

  /** log π of each token of each completion; `slope(b, t, log π)` gives the loss's derivative by it, and the gradient is made. */
  evaluate(prompts, completions, slope = null, bank = "weights") {
    const { model } = this, { tokens, length } = this.rows(prompts, completions), count = prompts.length;
    model.forward(bank, tokens, count, length);
    if (slope) model.f.fill(0, model.dlogits, model.dlogits + count * length * SHAPE.columns);
    const found = completions.map((given, b) => given.map((token, t) => {
      const row = b * length + PROMPT - 1 + t, logp = this.logSoftmax(row), own = logp[token];
      if (!slope) return own;
      const by = slope(b, t, own), at = model.dlogits + row * SHAPE.columns;
      for (let v = 0; v < V; v++) model.f[at + v] = by * ((v === token ? 1 : 0) - Math.exp(logp[v]));
      return own;
    }));
    if (slope) model.backward(tokens, count, length);
    return found;
  }

  /** A completion for each prompt, token by token; the r-th draws from the stream `first` + r. */
  sample(prompts, purpose, first) {
    const { model, seed } = this, count = prompts.length, completions = prompts.map(() => []);
    const streams = prompts.map((_, r) => stream(seed, purpose, first + r)), current = new Int32Array(count), done = new Uint8Array(count);
    for (let t = 0, open = count; t < LENGTH && open; t++) {
      for (let b = 0; b < count; b++) current[b] = t < PROMPT ? prompts[b][t] : completions[b].at(t - PROMPT) ?? END;
      model.next("weights", current, count, t);
      if (t < PROMPT - 1) continue;
      for (let b = 0; b < count; b++) {
        if (done[b]) continue;
        const logp = this.logSoftmax(b), drawn = uniform(streams[b], t - PROMPT + 1);
        let token = -1, below = 0;
        do below += Math.exp(logp[++token]); while (below <= drawn && token < V - 1);
        completions[b].push(token);
        if (token === END) [done[b], open] = [1, open - 1];
      }
    }
    return completions;
  }

  /** One step on careless demonstrations: the mean of −log π over their tokens. */
  fineTune({ wrong, tuningRate, warmup } = SETTINGS) {
    const index = Array.from({ length: DEMONSTRATIONS }, (_, i) => this.tuned * DEMONSTRATIONS + i);
    const prompts = index.map((i) => prompt(this.seed, FOR.demonstrations, i));
    const shown = index.map((i, b) => demonstrated(this.seed, i, prompts[b], wrong)), tokens = shown.flat().length;
    const logp = this.evaluate(prompts, shown, () => -1 / tokens);
    this.tuned += 1;
    const norm = this.model.step(tuningRate * Math.min(1, this.tuned / warmup));
    return { step: this.tuned, loss: -logp.flat().reduce((a, b) => a + b, 0) / tokens, norm };
  }

  /** The fine-tuned model becomes the reference, and GRPO starts from it. */
  beginReinforcement() {
    this.model.freeze();
    this.model.restart();
    this.steps = 0;
  }

  /** Back to the fine-tuned model. */
  again() {
    this.model.thaw();
    this.beginReinforcement();
  }

  /** One step of GRPO: completions in groups, their advantages, and `passes` updates on them. */
  reinforce(settings = SETTINGS) {
    const { group, clip, kl, reward, passes, rate } = settings, groups = COMPLETIONS / group;
    const asked = Array.from({ length: groups }, (_, g) => prompt(this.seed, FOR.prompts, this.steps * COMPLETIONS + g));
    const prompts = asked.flatMap((one) => Array(group).fill(one));
    const completions = this.sample(prompts, FOR.completions, this.steps * COMPLETIONS);
    const rewards = completions.map((given, b) => REWARDS[reward](prompts[b], given));
    const advantages = groupAdvantages(rewards, group);
    const reference = this.evaluate(prompts, completions, null, "reference");
    let old = null, updates = [];
    for (let pass = 0; pass < passes; pass++) {
      const found = this.update(prompts, completions, { old, reference, advantages, clip, kl, rate });
      old ??= found.logp;
      updates.push(found);
    }
    this.steps += 1;
    const right = completions.map((given, b) => isRight(prompts[b], given)), { hit, ratios } = updates.at(-1);
    return {
      step: this.steps,
      figures: {
        reward: mean(rewards), accuracy: mean(right), kl: updates[0].kl, clipped: updates.at(-1).clipped,
        length: mean(completions.map((given) => given.length)), dead: mean(deadGroups(rewards, group)),
        updates: updates.map(({ loss, kl: distance, clipped, norm }) => ({ loss, kl: distance, clipped, norm })),
      },
      groups: asked.map((one, g) => ({
        prompt: written(one), answer: written(answer(one)),
        completions: Array.from({ length: group }, (_, i) => g * group + i).map((b) => ({
          text: written(completions[b]), reward: rewards[b], advantage: advantages[b], right: right[b],
          logp: old[b], ratio: ratios[b], clipped: hit[b],
        })),
      })),
    };
  }

  /** One update: loss Σ (−min(ρA, clip(ρ)A) + β·k3) / (|y|·N), its figures, and which tokens had lost their gradient. */
  update(prompts, completions, { old, reference, advantages, clip, kl, rate }) {
    const hit = completions.map((given) => given.map(() => 0)), ratios = completions.map((given) => given.map(() => 1));
    let loss = 0, distance = 0, clipped = 0, tokens = 0;
    const logp = this.evaluate(prompts, completions, (b, t, now) => {
      const a = advantages[b], ratio = Math.exp(Math.min(now - (old ? old[b][t] : now), FURTHEST)), d = now - reference[b][t];
      const held = (a > 0 && ratio > 1 + clip) || (a < 0 && ratio < 1 - clip), weight = 1 / (completions[b].length * completions.length);
      const away = Math.exp(Math.min(-d, FURTHEST)), k3 = away - 1 + d;
      loss += weight * (-(held ? (a > 0 ? 1 + clip : 1 - clip) : ratio) * a + kl * k3);
      [distance, clipped, tokens] = [distance + k3, clipped + (held ? 1 : 0), tokens + 1];
      [hit[b][t], ratios[b][t]] = [held ? Math.sign(a) : 0, ratio];
      return weight * ((held ? 0 : -ratio * a) + kl * (1 - away));
    });
    return { logp, hit, ratios, loss, kl: distance / tokens, clipped: clipped / tokens, norm: this.model.step(rate) };
  }

  /** How often a completion of a held-out prompt is right, and how much it earns. */
  exam({ reward } = SETTINGS) {
    const prompts = Array.from({ length: EXAM }, (_, i) => prompt(this.seed, FOR.heldOut, i, true));
    const completions = this.sample(prompts, FOR.evaluation, EXAM * this.exams++);
    const given = (b) => REWARDS[reward](prompts[b], completions[b]);
    return { accuracy: mean(completions.map((one, b) => isRight(prompts[b], one))), reward: mean(prompts.map((_, b) => given(b))) };
  }
}

const mean = (numbers) => numbers.reduce((sum, x) => sum + Number(x), 0) / numbers.length;

/** A = (R − mean) / (std + 1e-4) within each group, with the unbiased standard deviation. */
function groupAdvantages(rewards, group) {
  return rewards.map((own, b) => {
    const start = b - (b % group), others = rewards.slice(start, start + group), middle = mean(others);
    const std = Math.sqrt(others.reduce((sum, r) => sum + (r - middle) ** 2, 0) / Math.max(group - 1, 1));
    return Math.abs(own - middle) < 1e-9 ? 0 : (own - middle) / (std + 1e-4);
  });
}

/** Groups whose rewards are all equal: nothing is learned from them. */
function deadGroups(rewards, group) {
  return Array.from({ length: rewards.length / group }, (_, g) => rewards.slice(g * group, (g + 1) * group)).map((own) => own.every((r) => r === own[0]));
}
