// The page's data of runs: the list, and the curves, of which only new points are requested.
import { events, get, pause, post } from "../api.js";

const RETRY_MS = 1000;
/** The most runs in one request. */
const AT_ONCE = 40;
const EMPTY = { generation: -1, curves: new Map(), keys: [], whole: true };

export class Runs {
  /** `changed(kind)` is called with "list" or "curves". */
  constructor(changed, live) {
    Object.assign(this, { changed, live, list: [], signals: [], folder: "", more: false, curves: new Map(), axis: "step", extra: false });
    Object.assign(this, { ids: [], watched: [], followed: "", following: null, asking: null, again: false });
    document.addEventListener("visibilitychange", () => this.follow(this.watched));
  }

  run(id) {
    return this.list.find((run) => run.id === id);
  }

  async refresh() {
    const answer = await get("/api/runs"), before = new Map(this.list.map((run) => [run.id, run.version]));
    Object.assign(this, { list: answer.runs, signals: answer.signals, folder: answer.folder, more: answer.more });
    this.changed("list");
    // more runs may be running than one stream of changes covers
    if (this.ids.some((id) => before.has(id) && this.run(id)?.version !== before.get(id))) this.update(this.ids, this.axis, this.extra).catch(() => this.live(false));
    return answer.whole;
  }

  /** Update the curves of these runs; with `extra`, of all keys. Only one request runs at a time; later calls share the next. */
  async update(ids, axis, extra) {
    if (axis !== this.axis) this.curves.clear();
    Object.assign(this, { axis, extra, ids });
    if (this.asking) {
      this.again = true;
      return this.asking;
    }
    this.asking = this.fetch();
    try {
      await this.asking;
    } finally {
      this.asking = null;
    }
    if (this.again) {
      this.again = false;
      return this.update(this.ids, this.axis, this.extra);
    }
  }

  async fetch() {
    if (!this.ids.length) return this.changed("curves");
    const axis = this.axis;
    const runs = this.ids.map((id) => {
      const known = this.curves.get(id) ?? EMPTY;
      return { id, generation: Math.max(0, known.generation), have: Object.fromEntries([...known.curves].map(([name, c]) => [name, c.count])) };
    });
    const keys = [...new Set(this.ids.flatMap((id) => this.curves.get(id)?.keys ?? []))];
    const names = this.extra && keys.length ? keys.slice(0, 500) : null;
    for (let from = 0; from < runs.length; from += AT_ONCE) {
      const answer = await post("/api/runs/curves", { runs: runs.slice(from, from + AT_ONCE), names, axis });
      if (axis !== this.axis) return;
      for (const one of answer) this.take(one);
      this.changed("curves");
      if (answer.some((one) => !one.whole)) this.again = true;
    }
    if (this.extra && names === null) this.again = true;
  }

  take(one) {
    let known = this.curves.get(one.id);
    if (!known || known.generation !== one.generation) known = { ...EMPTY, curves: new Map() };
    for (const [name, curve] of Object.entries(one.curves)) {
      const old = known.curves.get(name);
      const steps = one.grids[curve.steps], x = curve.x ?? steps, { values } = curve;
      if (!old || curve.first === 0 || curve.first !== old.count) {
        const own = steps.slice(); // curves share this array in the answer, so copy it before it grows
        known.curves.set(name, { steps: own, x: curve.x ?? own, values, count: curve.count });
        continue;
      }
      for (let i = 0; i < values.length; i++) {
        old.steps.push(steps[i]);
        if (old.x !== old.steps) old.x.push(x[i]);
        old.values.push(values[i]);
      }
      old.count = curve.count;
    }
    this.curves.set(one.id, { ...known, generation: one.generation, keys: one.keys, whole: one.whole });
  }

  /** Subscribe to changes of these runs. Stop while the page is hidden, since a browser has few connections. */
  follow(ids) {
    this.watched = ids;
    const going = ids.filter((id) => this.run(id)?.state === "running"), others = ids.filter((id) => !going.includes(id));
    const wanted = document.hidden ? "" : [...going, ...others].slice(0, AT_ONCE).join(",");
    if (wanted === this.followed) return;
    this.followed = wanted;
    this.following?.abort();
    this.following = wanted ? new AbortController() : null;
    if (wanted) this.listen(`/api/runs/live?runs=${wanted}`, this.following.signal);
  }

  async listen(path, signal) {
    while (!signal.aborted) {
      try {
        for await (const entry of events(path, undefined, signal, () => this.live(true))) this.heard(entry);
      } catch {
        if (!signal.aborted) this.live(false);
      }
      await pause(RETRY_MS);
    }
  }

  heard(entry) {
    const at = this.list.findIndex((run) => run.id === entry.id);
    if (at < 0) return;
    const old = this.list[at];
    this.list[at] = entry;
    this.changed("list");
    const moved = old.version !== entry.version || old.generation !== entry.generation;
    const known = this.curves.get(entry.id);
    if (this.ids.includes(entry.id) && (moved || known?.generation !== entry.generation)) this.update(this.ids, this.axis, this.extra).catch(() => this.live(false));
  }
}
