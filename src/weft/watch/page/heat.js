// A heat map: rows × columns in the colours of cividis, which look the same to colour-blind eyes.
import { colour, el, figureOf, sheet, ticks, trimmed } from "./dom.js";

const CIVIDIS = [0,34,77,0,45,105,26,56,111,49,67,108,67,78,107,82,89,108,97,100,111,110,112,115,124,123,120,139,135,120,
                 155,147,118,171,160,114,187,173,108,204,187,99,222,201,87,239,216,70,253,231,55]; // matplotlib 3.10, 17 of 256
const LEFT = 74, BOTTOM = 24, TOP = 4;

function shades() {
  const made = new Uint32Array(256);
  for (let at = 0; at < 256; at += 1) {
    const place = (at / 255) * 16, low = Math.min(Math.floor(place), 15), part = place - low;
    const mix = (channel) => Math.round(CIVIDIS[3 * low + channel] * (1 - part) + CIVIDIS[3 * low + 3 + channel] * part);
    made[at] = (255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0);
  }
  return made;
}
const SHADES = shades();

export function makeHeat(block, context) {
  let shown = block, cursor = null;
  const low = el("span"), high = el("span"), bar = el("canvas", { width: 256, height: 1, "aria-hidden": "true" });
  bar.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(SHADES.buffer), 256, 1), 0, 0);
  const readout = el("p", { class: "readout" });
  const cells = document.createElement("canvas");
  const heightOf = () => Math.min(Math.max(shown.rows.length * 18, 90), 560) + BOTTOM + TOP;
  const drawn = sheet({ tabindex: 0, role: "application", "aria-roledescription": "heat map" }, heightOf, draw);

  function fill() {
    const columns = shown.x.length, rows = shown.rows.length;
    cells.width = Math.max(columns, 1);
    cells.height = Math.max(rows, 1);
    const pixels = new Uint32Array(cells.width * cells.height), factor = 255 / (shown.high - shown.low || 1);
    for (let row = 0; row < rows; row += 1) {
      const values = shown.values[row];
      for (let at = 0; at < columns; at += 1) {
        const value = values[at];
        if (value === null || value === undefined) continue;
        pixels[row * columns + at] = SHADES[Math.min(255, Math.max(0, Math.round((value - shown.low) * factor)))];
      }
    }
    cells.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), cells.width, cells.height), 0, 0);
    low.textContent = `${figureOf(shown.low)} ${shown.unit}`;
    high.textContent = `${figureOf(shown.high)} ${shown.unit} and more`;
    drawn.canvas.setAttribute("aria-label", `${shown.title}. Arrow keys move from cell to cell.`);
  }

  function draw(pen, width, height) {
    const inner = { left: LEFT, top: TOP, width: width - LEFT - 4, height: height - BOTTOM - TOP };
    pen.imageSmoothingEnabled = false;
    pen.fillStyle = colour("faint");
    pen.fillRect(inner.left, inner.top, inner.width, inner.height);
    pen.drawImage(cells, inner.left, inner.top, inner.width, inner.height);
    const step = inner.height / shown.rows.length, every = Math.max(1, Math.ceil(13 / step));
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    for (let row = 0; row < shown.rows.length; row += every) {
      pen.fillText(trimmed(pen, shown.rows[row].split("…")[0], LEFT - 10), LEFT - 6, inner.top + (row + 0.5) * step);
    }
    pen.textAlign = "center";
    const columns = shown.x.length, wide = inner.width / columns;
    for (const at of ticks(0, columns - 1, inner.width / 90)) {
      if (Number.isInteger(at)) pen.fillText(shown.x[at].toLocaleString("en-US"), inner.left + (at + 0.5) * wide, height - 9);
    }
    pen.fillStyle = colour("sheet");
    for (const row of shown.cuts) pen.fillRect(inner.left, inner.top + row * step - 1, inner.width, 2);
    if (cursor) {
      pen.strokeStyle = colour("ink");
      pen.lineWidth = 2;
      pen.strokeRect(inner.left + cursor.column * wide - 1, inner.top + cursor.row * step - 1, Math.max(wide, 3) + 2, Math.max(step, 3) + 2);
    }
  }

  function show(row, column) {
    cursor = { row: Math.max(0, Math.min(shown.rows.length - 1, row)), column: Math.max(0, Math.min(shown.x.length - 1, column)) };
    const value = shown.values[cursor.row][cursor.column], about = shown.about[cursor.row];
    const what = shown.x_name ? shown.rows[cursor.row] : `rank ${shown.rows[cursor.row]}`;
    const where = shown.x_name || "step";
    readout.textContent = `${what}${about ? ` (${about})` : ""}, ${where} ${shown.x[cursor.column].toLocaleString("en-US")}: ` +
      (value === null ? "not recorded" : `${figureOf(value)} ${shown.unit}`) + (shown.firsts.length && context.navigate ? ". Enter or a click shows the rank." : "");
    drawn.redraw();
  }

  function at(event) {
    const box = drawn.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT - 4)) * shown.x.length);
    const row = Math.floor(((event.clientY - box.top - TOP) / (box.height - BOTTOM - TOP)) * shown.rows.length);
    return [row, column];
  }

  function choose() {
    if (cursor && shown.firsts.length && context.navigate) context.navigate("ranks", { rank: String(shown.firsts[cursor.row]) });
  }

  drawn.canvas.addEventListener("mousemove", (event) => show(...at(event)));
  drawn.canvas.addEventListener("click", (event) => { show(...at(event)); choose(); });
  drawn.canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-16, 0], PageDown: [16, 0] };
    if (event.key === "Enter") return choose();
    const move = event.key === "Home" ? [0, -shown.x.length] : event.key === "End" ? [0, shown.x.length] : moves[event.key];
    if (!move) return undefined;
    event.preventDefault();
    const from = cursor || { row: 0, column: shown.x.length - 1 };
    return show(from.row + move[0], from.column + move[1]);
  });
  fill();
  return {
    node: el("div", {}, el("div", { class: "scale" }, low, bar, high), drawn.place, readout),
    update(next) {
      shown = next;
      if (cursor && (cursor.row >= next.rows.length || cursor.column >= next.x.length)) cursor = null;
      fill();
      drawn.redraw();
    },
    end: drawn.end,
  };
}
