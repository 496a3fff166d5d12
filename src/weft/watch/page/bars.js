// Stacked bars, made of elements, so that a screen reader and a search find what is written in them.
import { el, figureOf, paletteOf } from "./dom.js";

const MANY_ROWS = 24;
const LEAST_TEXT_SHARE = 0.07;

export function makeBars(block, context) {
  const node = el("div");

  function draw(shown) {
    const places = paletteOf(shown.parts.map((part) => part.name));
    const limits = shown.against || [];
    const most = Math.max(1e-12, ...shown.totals.map((total) => total ?? 0), ...limits.map((limit) => limit ?? 0));
    const keys = shown.parts.map((part, at) => el("li", {}, el("i", { class: `p${places[at]}` }), part.name));
    if (limits.some((limit) => limit !== null)) keys.push(el("li", {}, el("i", { class: "mark" }), legendOf(shown)));
    const rows = el("div", { class: shown.rows.length > MANY_ROWS ? "rows dense" : "rows" });
    shown.rows.forEach((name, row) => {
      const options = shown.links[row];
      const label = options && context.link ? el("a", { href: context.link("ranks", options) }, name) : name;
      rows.append(el("div", { class: "name" }, label), trackOf(shown, row, places, most, limits[row]), sumOf(shown, row));
    });
    node.replaceChildren(...(keys.length > 1 || limits.length ? [el("ul", { class: "legend" }, ...keys)] : []), rows);
  }

  draw(block);
  return { node, update: draw, end() {} };
}

function legendOf(shown) {
  return shown.title.includes("by phase") ? "median of its peers" : "plan";
}

function sumOf(shown, row) {
  const total = shown.totals[row];
  return el("div", { class: "sum" }, total === null ? "–" : `${figureOf(total)} ${shown.unit}`);
}

function trackOf(shown, row, places, most, limit) {
  const track = el("div", { class: "track" });
  shown.parts.forEach((part, at) => {
    const value = part.values[row];
    if (!value || value < 0) return;
    const share = value / most;
    const segment = el("span", { class: `p${places[at]}`, title: `${part.name}: ${figureOf(value)} ${shown.unit}` });
    if (share > LEAST_TEXT_SHARE && shown.parts.length > 1) segment.textContent = figureOf(value);
    segment.style.width = `${100 * share}%`;
    track.append(segment);
  });
  if (limit !== null && limit !== undefined) {
    const mark = el("span", { class: "mark", title: `${legendOf(shown)}: ${figureOf(limit)} ${shown.unit}` });
    mark.style.left = `calc(${(100 * limit) / most}% - 1px)`;
    track.append(mark);
  }
  return track;
}
