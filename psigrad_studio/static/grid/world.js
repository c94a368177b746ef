// A grid world. Its text has the rows from the top, with numbers for runs of free cells:
// 8/6G1/8/4T3/8/8/8/8 is the default. G pays 1, T pays -1, (2.5) pays 2.5, W is a wall, S the start.

export const LARGEST = 20;
export const DEFAULT = "8/6G1/8/4T3/8/8/8/8";
export const LAYOUTS = [
  ["Open field", DEFAULT],
  ["Corridor of traps", "8/1TTTTT2/8/S6G/8/1TTTTT2/8/8"],
  ["Wall with a gap", "8/8/3W3G/3W4/3W4/3W2T1/S2W4/8"],
  ["Four rooms", "5W5/5W3G1/11/5W5/5W5/1W2WWWW1WW/5W2T2/5W5/11/S4W5/5W5"],
  ["Cliff", "8/8/8/STTTTTTG"],
  ["Near and far", "8/1(0.3)6/8/8/3TT3/8/6(2)1/8"],
  ["Classic 3 × 4", "3G/1W1T/S3"],
];

const key = (row, column) => `${row},${column}`;
const place = (text) => text.split(",").map(Number);

/** An immutable world. Every change returns a new one. */
export class World {
  constructor(rows, columns, prizes = new Map(), walls = new Set(), start = null) {
    Object.assign(this, { rows, columns, prizes, walls, start });
    Object.freeze(this);
  }

  /** Return the world of a text. Throws an Error with a message for an invalid one. */
  static parse(text) {
    const prizes = new Map(), walls = new Set();
    let start = null, columns = null;
    const lines = String(text).split("/");
    if (lines.length > LARGEST) throw new Error(`The map has ${lines.length} rows; at most ${LARGEST} fit.`);
    lines.forEach((line, row) => {
      let column = 0;
      for (const [sign, worth] of pieces(line)) {
        if (/^[0-9]+$/.test(sign)) {
          column += Number(sign);
          continue;
        }
        if (sign === "W") walls.add(key(row, column));
        else if (sign === "S") start = [row, column];
        else prizes.set(key(row, column), worth);
        column += 1;
      }
      columns ??= column;
      if (column !== columns || column < 1 || column > LARGEST) {
        throw new Error(`Row ${row + 1} of the map has ${column} cells; expected ${columns}, and at most ${LARGEST}.`);
      }
    });
    return new World(lines.length, columns, prizes, walls, start);
  }

  toString() {
    const lines = [];
    for (let row = 0; row < this.rows; row += 1) {
      let line = "", free = 0;
      for (let column = 0; column < this.columns; column += 1) {
        const sign = this.sign(row, column);
        if (sign === "") {
          free += 1;
        } else {
          line += (free || "") + sign;
          free = 0;
        }
      }
      lines.push(line + (free || ""));
    }
    return lines.join("/");
  }

  sign(row, column) {
    const { kind, worth } = this.at(row, column);
    if (kind === "prize") return worth === 1 ? "G" : worth === -1 ? "T" : `(${worth})`;
    return { wall: "W", start: "S", free: "" }[kind];
  }

  /** Return the content of a cell: {kind: prize | wall | start | free, worth}. */
  at(row, column) {
    const name = key(row, column);
    if (this.prizes.has(name)) return { kind: "prize", worth: this.prizes.get(name) };
    if (this.walls.has(name)) return { kind: "wall" };
    if (this.start !== null && this.start[0] === row && this.start[1] === column) return { kind: "start" };
    return { kind: "free" };
  }

  /** Return the world with another content of a cell. */
  with(row, column, piece) {
    const prizes = new Map(this.prizes), walls = new Set(this.walls), name = key(row, column);
    let start = this.at(row, column).kind === "start" ? null : this.start;
    prizes.delete(name);
    walls.delete(name);
    if (piece.kind === "prize") prizes.set(name, piece.worth);
    else if (piece.kind === "wall") walls.add(name);
    else if (piece.kind === "start") start = [row, column];
    return new World(this.rows, this.columns, prizes, walls, start);
  }

  /** Return the world with the piece at `from` moved to the free cell `to`. */
  moved(from, to) {
    return this.with(...from, { kind: "free" }).with(...to, this.at(...from));
  }

  /** Return the world cut or extended at the bottom and the right. */
  resized(rows, columns) {
    const inside = (name) => place(name)[0] < rows && place(name)[1] < columns;
    const prizes = new Map([...this.prizes].filter(([name]) => inside(name)));
    const walls = new Set([...this.walls].filter(inside));
    const start = this.start !== null && inside(key(...this.start)) ? this.start : null;
    return new World(rows, columns, prizes, walls, start);
  }

  /** Return the world as the server's form. */
  form(settings) {
    return {
      rows: this.rows,
      columns: this.columns,
      prizes: [...this.prizes].map(([name, worth]) => [...place(name), worth]),
      walls: [...this.walls].map(place),
      start: this.start,
      slip: settings.slip,
      step_reward: settings.cost === 0 ? 0 : -settings.cost,
      gamma: settings.discount,
    };
  }
}

function* pieces(line) {
  const sign = /([0-9]{1,2})|([GTWS])|\((-?[0-9]{1,4}(?:\.[0-9]{1,4})?)\)/y;
  while (sign.lastIndex < line.length) {
    const at = sign.lastIndex, found = sign.exec(line);
    if (found === null) throw new Error(`The map has ${JSON.stringify(line.slice(at, at + 8))}; expected numbers, G, T, W, S or (reward).`);
    const worth = found[2] === "G" ? 1 : found[2] === "T" ? -1 : Number(found[3]);
    yield [found[0], worth];
  }
}
