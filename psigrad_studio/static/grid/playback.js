// A playback: the frames of an algorithm, fetched from the server in parts when needed.
import { persistently, post } from "../api.js";

const FIRST = 20, NEAR = 30, AHEAD = 60;
/** The waits in milliseconds before repeated requests, if the studio reports too many requests. */
const WAITS = [500, 1000, 1500, 2000, 2500];

export class Playback {
  /** `request` is the server's form without first and count. `whole` requests all frames at once. `changed` is called after each part. */
  constructor(request, whole, changed) {
    Object.assign(this, { request, whole, changed, frames: [], length: 0, ended: false, note: "", target: [], map: "", failure: null });
    Object.assign(this, { stopped: new AbortController(), wanted: 0, loading: null });
  }

  /** Resolve when frame `index` is loaded, or when the playback has ended before it or has failed. */
  async ensure(index) {
    const here = this.frames.length > index;
    this.wanted = Math.max(this.wanted, here ? index + NEAR : index);
    if (this.over || (here && this.frames.length > this.wanted)) return;
    this.loading ??= this.load();
    if (here) return; // later frames are loaded in the background
    await this.loading;
    if (this.frames.length <= index && !this.over) await this.ensure(index);
  }

  get over() {
    return this.ended || this.failure !== null || this.stopped.signal.aborted;
  }

  /** True until the first frame is loaded. */
  get awaited() {
    return this.frames.length === 0 && !this.over;
  }

  get last() {
    return this.frames.length - 1;
  }

  /** Return the frame of a step; the last loaded one if there are fewer. */
  at(index) {
    return this.frames[Math.min(index, this.last)] ?? null;
  }

  async load() {
    try {
      while (!this.over && this.frames.length <= this.wanted) {
        const first = this.frames.length;
        const ahead = this.whole ? 400 : first === 0 ? FIRST : AHEAD;
        const count = Math.min(400, this.wanted - first + 1 + ahead);
        const ask = () => post("/api/grid/frames", { ...this.request, first, count }, this.stopped.signal);
        const answer = await persistently(ask, WAITS, (error) => error.status === 429);
        this.frames.push(...answer.frames);
        this.ended = answer.ended && this.frames.length >= answer.known;
        this.length = answer.length ?? this.frames.length;
        Object.assign(this, { note: answer.note, target: answer.target, map: answer.map });
        this.changed();
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        this.failure = error;
        this.changed();
      }
    } finally {
      this.loading = null;
    }
  }

  stop() {
    this.stopped.abort();
  }
}
