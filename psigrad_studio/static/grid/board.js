// One grid: cells with values as colours and numbers, arrows for the policy, and pieces that can be moved by mouse or keyboard.
import { el, svg } from "../dom.js";

const TURNS = [0, 90, 180, 270];
const WHOLE = "M0 7V-7M-4.5-2.5 0-7l4.5 4.5", HALF = "M0 0V-8M-3-5.2 0-8l3 2.8";
const NAMES = ["up", "right", "down", "left"];
const ANY = 15;
const DRAG_AFTER = 5;

/** "row 2, column 7", counted from 1. */
export const spoken = ([row, column]) => `row ${row + 1}, column ${column + 1}`;

/** Return a number with at most `digits` decimals, and a typographic minus. */
export const short = (x, digits = 2) => (Math.abs(x) < 0.5 * 10 ** -digits ? "0" : x.toFixed(digits).replace("-", "−"));
export const signed = (x) => `${x > 0 ? "+" : x < 0 ? "−" : ""}${Number(Math.abs(x).toPrecision(4))}`;

/** Return the name of a piece. */
export const named = (piece) =>
  piece.kind === "prize" ? `${piece.worth < 0 ? "trap" : "treasure"} ${signed(piece.worth)}` : { wall: "wall", start: "start", free: "free" }[piece.kind];

/**
 * `told` has the callbacks of the board: select(cell), pick(cell), drop(cell), cancel(), drag(from, to, last) -> moved, dropped(),
 * edit(cell, what), play(what); and its questions: world(), carried() -> cell or null.
 */
export class Board {
  constructor(label, told) {
    Object.assign(this, { told, focused: [0, 0], cells: [], size: "" });
    this.node = el("div", { role: "grid", class: "board", "aria-label": label, "aria-describedby": "board-help" });
    this.path = svg("polyline", { class: "path" });
    this.overlay = svg("svg", { class: "overlay", "aria-hidden": "true", preserveAspectRatio: "none" }, this.path);
    this.wrap = el("div", { class: "board-wrap" }, this.node, this.overlay);
    this.node.addEventListener("keydown", (event) => this.onKey(event));
    this.node.addEventListener("focusin", (event) => this.onFocus(event));
    this.node.addEventListener("pointerdown", (event) => this.onPointerDown(event));
  }

  /** Show a frame (or only the world, for null), with `scale` as the value of the strongest colour. */
  draw(world, frame, scale, mark) {
    this.rebuild(world);
    for (let row = 0; row < world.rows; row += 1) {
      for (let column = 0; column < world.columns; column += 1) {
        const state = row * world.columns + column;
        const value = frame === null ? null : frame.value[state];
        this.drawCell(this.cells[state], [row, column], world.at(row, column), value, frame?.actions[state] ?? ANY, scale);
      }
    }
    this.mark(mark);
    this.drawPath(world, frame);
  }

  rebuild(world) {
    const size = `${world.rows}×${world.columns}`;
    if (size === this.size) return;
    this.size = size;
    this.cells = [];
    const rows = [];
    for (let row = 0; row < world.rows; row += 1) {
      const cells = [];
      for (let column = 0; column < world.columns; column += 1) cells.push(cellOf(row, column));
      this.cells.push(...cells);
      rows.push(el("div", { role: "row", class: "board-row" }, ...cells.map((cell) => cell.node)));
    }
    this.node.replaceChildren(...rows);
    this.overlay.setAttribute("viewBox", `0 0 ${world.columns} ${world.rows}`);
    this.wrap.style.setProperty("--columns", world.columns);
    this.wrap.style.setProperty("--rows", world.rows);
    this.focused = [Math.min(this.focused[0], world.rows - 1), Math.min(this.focused[1], world.columns - 1)];
  }

  drawCell(cell, place, piece, value, actions, scale) {
    const { node } = cell;
    const ends = piece.kind === "prize" || piece.kind === "wall";
    const strength = ends || value === null ? 0 : Math.min(1, Math.abs(value) / scale);
    const kind = piece.kind === "prize" ? (piece.worth < 0 ? "trap" : "treasure") : piece.kind;
    const look = `${kind} ${value !== null && value < 0 ? "below" : "above"}`;
    if (cell.look !== look) {
      node.className = `cell ${look}`;
      cell.look = look;
    }
    node.style.setProperty("--s", strength.toFixed(3));
    const text = piece.kind === "prize" ? signed(piece.worth) : piece.kind === "wall" || value === null ? "" : short(value);
    if (cell.text.data !== text) cell.text.data = text;
    const shown = ends || value === null || actions === ANY ? 0 : actions;
    const lone = (shown & (shown - 1)) === 0;
    cell.arrows.forEach((arrow, action) => {
      arrow.classList.toggle("on", Boolean(shown & (1 << action)));
      const shape = lone ? WHOLE : HALF;
      if (arrow.getAttribute("d") !== shape) arrow.setAttribute("d", shape);
    });
    cell.any.classList.toggle("on", !ends && value !== null && actions === ANY);
    const moves = shown ? `, ${NAMES.filter((_, action) => shown & (1 << action)).join(" or ")}` : "";
    const worth = ends || value === null ? "" : `, value ${short(value, 4)}`;
    node.setAttribute("aria-label", `${spoken(place)}: ${named(piece)}${worth}${moves}`);
    if (value === null) delete node.dataset.value;
    else node.dataset.value = String(value);
    node.dataset.actions = String(actions);
  }

  /** Draw the path of the last episode, if there is one. */
  drawPath(world, frame) {
    const states = frame?.episode?.states ?? [];
    const point = (state) => `${(state % world.columns) + 0.5},${Math.floor(state / world.columns) + 0.5}`;
    this.path.setAttribute("points", states.map(point).join(" "));
  }

  mark({ cell, carried, here }) {
    if (cell !== null && !this.node.contains(document.activeElement)) this.focused = cell;
    const [row, column] = this.focused;
    this.cells.forEach(({ node, place: [r, c] }) => {
      const is = (place) => place !== null && place[0] === r && place[1] === c;
      node.tabIndex = r === row && c === column ? 0 : -1;
      node.classList.toggle("selected", here && is(cell));
      node.setAttribute("aria-selected", String(here && is(cell)));
      node.classList.toggle("carried", here && is(carried));
    });
  }

  /** Move the focus to a cell. */
  focus(place) {
    this.focused = place;
    const cell = this.cells.find((c) => c.place[0] === place[0] && c.place[1] === place[1]);
    cell?.node.focus({ preventScroll: true });
  }

  onFocus(event) {
    const place = placeOf(event.target);
    if (place === null) return;
    this.focused = place;
    this.told.select(place);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const world = this.told.world(), [row, column] = this.focused;
    const to = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, world.columns - 1],
      PageUp: [0, column],
      PageDown: [world.rows - 1, column],
    }[event.key];
    const edits = { t: "treasure", x: "trap", w: "wall", s: "start", Delete: "clear", Backspace: "clear" };
    const plays = { p: "play", ".": "forward", ",": "back", r: "reset" };
    const name = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (to !== undefined) {
      if (to[0] >= 0 && to[0] < world.rows && to[1] >= 0 && to[1] < world.columns) this.focus(to);
    } else if (name === "Enter" || name === " ") {
      this.choose(this.focused);
    } else if (name === "Escape" && this.told.carried() !== null) {
      this.told.cancel();
    } else if (Object.hasOwn(edits, name)) {
      this.told.edit(this.focused, edits[name]);
    } else if (Object.hasOwn(plays, name)) {
      this.told.play(plays[name]);
    } else {
      return;
    }
    event.preventDefault();
  }

  /** Handle a click, Enter or Space: pick up a piece, put it down, or select the cell. */
  choose(place) {
    const carried = this.told.carried(), kind = this.told.world().at(...place).kind;
    if (carried !== null) this.told.drop(place);
    else if (kind === "free") this.told.select(place);
    else this.told.pick(place);
  }

  onPointerDown(event) {
    const from = placeOf(event.target);
    if (from === null || event.button !== 0) return;
    if (event.shiftKey) {
      event.preventDefault();
      this.focus(from);
      this.told.edit(from, this.told.world().at(...from).kind === "wall" ? "clear" : "wall");
      return;
    }
    const movable = this.told.carried() === null && this.told.world().at(...from).kind !== "free";
    const drag = { from, at: from, x: event.clientX, y: event.clientY, started: false };
    const target = event.target.closest(".cell");
    const move = (e) => this.onDrag(drag, e);
    const finish = (e) => {
      for (const name of ["pointermove", "pointerup", "pointercancel"]) window.removeEventListener(name, name === "pointermove" ? move : finish);
      this.node.classList.remove("dragging");
      if (drag.started) {
        if (drag.to !== undefined && this.told.drag(drag.at, drag.to, true)) drag.at = drag.to;
        this.told.dropped();
        this.focus(drag.at);
      } else if (e.type === "pointerup" && target.contains(document.elementFromPoint(e.clientX, e.clientY))) {
        this.focus(from);
        this.choose(from);
      }
    };
    if (movable) window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", finish);
    window.addEventListener("pointercancel", finish);
    if (movable) event.preventDefault();
  }

  /** Move the piece with the pointer from one free cell to the next. The world is solved again after each move. */
  onDrag(drag, event) {
    if (!drag.started && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < DRAG_AFTER) return;
    drag.started = true;
    this.node.classList.add("dragging");
    const under = document.elementFromPoint(event.clientX, event.clientY);
    const to = this.node.contains(under) ? placeOf(under) : null;
    drag.to = undefined;
    if (to === null || (to[0] === drag.at[0] && to[1] === drag.at[1]) || this.told.world().at(...to).kind !== "free") return;
    // if the studio is busy, the piece follows with the next movement, or when it is put down
    if (this.told.drag(drag.at, to)) drag.at = to;
    else drag.to = to;
  }
}

function cellOf(row, column) {
  const arrows = TURNS.map((turn) => svg("path", { transform: `rotate(${turn})` }));
  const any = svg("circle", { r: 1.6, class: "any" });
  const text = document.createTextNode("");
  const node = el(
    "div",
    { role: "gridcell", class: "cell", tabindex: -1, "data-row": row, "data-column": column },
    svg("svg", { class: "arrow", viewBox: "-10 -10 20 20", "aria-hidden": "true" }, ...arrows, any),
    el("span", { class: "number", "aria-hidden": "true" }, text),
  );
  return { node, arrows, any, text, place: [row, column] };
}

function placeOf(node) {
  const cell = node instanceof Element ? node.closest(".cell") : null;
  return cell === null ? null : [Number(cell.dataset.row), Number(cell.dataset.column)];
}
