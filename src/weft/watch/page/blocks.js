// Blocks of a page that are words, numbers and cells, and the table that stands beside every drawing.
import { makeBars } from "./bars.js";
import { el } from "./dom.js";
import { makeGantt } from "./gantt.js";
import { makeHeat } from "./heat.js";
import { makeLines } from "./lines.js";

export function tableOf(table, label) {
  const kind = (column) => (table.columns[column].number ? "number" : null);
  const heads = table.columns.map((column, at) => el("th", { scope: "col", class: kind(at) }, column.name));
  const rows = table.rows.map((row) => el("tr", {}, ...row.map((cell, at) => el("td", { class: kind(at) }, cell))));
  const cells = el("table", { class: "cells", "aria-label": label }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${label}, table` }, cells);
}

// A block that is made anew whenever it changes.
function simple(draw) {
  return (block, context) => {
    const node = el("div");
    const update = (next) => node.replaceChildren(...[draw(next, context)].flat());
    update(block);
    return { node, update, end() {} };
  };
}

function verdictsOf(block, context) {
  const items = block.verdicts.map((verdict) => {
    const links = verdict.ranks.map((rank) => el("a", { href: context.link("ranks", { rank: String(rank) }) }, `rank ${rank}`));
    const cost = verdict.cost ? el("p", { class: "cost" }, el("b", {}, verdict.cost), ` · confidence ${verdict.confidence}`) : null;
    if (cost && links.length) cost.append(" · show ", ...links.flatMap((link, at) => (at ? [", ", link] : [link])));
    const evidence = verdict.evidence.length ? el("ul", { class: "evidence" }, ...verdict.evidence.map((each) => el("li", {}, each))) : null;
    const next = verdict.next ? el("p", { class: "next" }, el("b", {}, "Next: "), verdict.next) : null;
    return el("li", {}, el("p", { class: "finding" }, verdict.title), cost, evidence, next);
  });
  return el("ol", {}, ...items);
}

function figuresOf(block) {
  const parts = block.figures.map((figure) =>
    el("div", {}, el("dt", {}, figure.name), el("dd", { class: "value" }, figure.value), el("dd", { class: "about" }, figure.about)));
  return el("dl", {}, ...parts);
}

function textsOf(block) {
  return block.texts.flatMap((each) => [
    el("h3", {}, each.title),
    el("pre", { tabindex: 0, role: "region", "aria-label": each.title, class: block.wraps ? "wraps" : "" }, each.text),
  ]);
}

function bannerOf(block, context) {
  return context.page === block.page ? [] : el("a", { href: context.link(block.page, {}) }, "Where every rank is");
}

function makeControls(block, context) {
  const node = el("div", { class: "controls" });
  function draw(shown) {
    if (node.contains(document.activeElement)) return; // a list that is open stays as it is
    node.replaceChildren(...shown.choices.map((choice) => {
      const list = el("select", { onchange: (event) => context.navigate(context.page, { ...context.options, [choice.name]: event.target.value }) });
      for (const [value, title] of choice.options) list.append(el("option", { value, selected: value === choice.value }, title));
      return el("label", {}, choice.title, list);
    }));
  }
  draw(block);
  return { node, update: draw, end() {} };
}

const HEAVY = [[0.5, "heavy3"], [0.25, "heavy2"], [0.1, "heavy1"]];
const MOST_CELLS = 512;

function shadeOf(excess) {
  if (excess === null) return "unknown";
  if (excess < -0.1) return "light1";
  return HEAVY.find(([least]) => excess >= least)?.[1] || "";
}

function moreOf(excess) {
  if (excess === null) return "unknown";
  const percent = Math.round(100 * excess);
  return percent ? `${percent > 0 ? "+" : "−"}${Math.abs(percent)} %` : "0 %";
}

function meshOf(block, context) {
  const total = block.hosts.reduce((sum, host) => sum + host.ranks.length, 0);
  const cell = (name, excess, about, rank) => el("li", {}, el("a", {
    class: `cell ${shadeOf(excess)}`, href: context.link("ranks", { rank: String(rank) }), title: about,
  }, el("b", {}, name), moreOf(excess)));
  if (total > MOST_CELLS) {
    const cells = block.hosts.map((host) => {
      const worst = host.ranks.reduce((most, rank) => ((rank.excess ?? -1) > (most.excess ?? -1) ? rank : most));
      return cell(host.name, worst.excess, `rank ${worst.rank} differs most of ${host.ranks.length}`, worst.rank);
    });
    return el("div", { class: "host" }, el("h3", {}, "Hosts, each by its rank that differs most"), el("ul", {}, ...cells));
  }
  const hosts = block.hosts.map((host) => el("div", { class: "host" }, el("h3", {}, host.name),
    el("ul", {}, ...host.ranks.map((rank) => cell(String(rank.rank), rank.excess, [rank.about, rank.device].filter(Boolean).join(", "), rank.rank)))));
  return el("div", { class: "hosts" }, ...hosts);
}

const LANE = 26, LEFT = 110;
const SHAPES = {
  checkpoint: "M-4-4h8v8h-8z", evaluation: "M0-5 5 0 0 5-5 0z", warning: "M0-5 5 4h-10z", failure: "M-5-5 0-1.500 5-5 1.500 0 5 5 0 1.500-5 5-1.500 0z",
  generation: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z", gap: "M-4-2h8v4h-8z",
};

function timelineOf(block) {
  const width = Math.max(420, document.getElementById("blocks").clientWidth - 40);
  const height = block.lanes.length * LANE + 18, long = Math.max(block.to - block.from, 1e-9);
  const x = (time) => LEFT + ((time - block.from) / long) * (width - LEFT - 10);
  const parts = [];
  block.shades.forEach((shade, at) => {
    const left = x(shade.from), wide = Math.max(x(shade.to) - left, 1);
    parts.push(el("rect", { class: `shade${at % 2}`, x: left, y: 0, width: wide, height: height - 18 }, el("title", {}, shade.name)));
    if (wide > 90) parts.push(el("text", { x: left + 4, y: height - 4 }, shade.name));
  });
  block.lanes.forEach((lane, at) => {
    const y = at * LANE + LANE / 2;
    parts.push(el("line", { class: "lane", x1: LEFT, x2: width - 10, y1: y, y2: y }),
               el("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, lane.length > 16 ? `${lane.slice(0, 15)}…` : lane));
  });
  for (const mark of block.marks) {
    const y = block.lanes.indexOf(mark.lane) * LANE + LANE / 2, kind = SHAPES[mark.kind] ? mark.kind : "warning";
    const said = `${block.titles[mark.kind] || mark.kind}${mark.step ? `, step ${mark.step}` : ""}: ${mark.text}`;
    parts.push(el("path", { class: `mark ${kind}`, d: SHAPES[kind], transform: `translate(${x(mark.time)} ${y})` }, el("title", {}, said)));
  }
  const used = Object.keys(block.titles).filter((kind) => block.marks.some((mark) => mark.kind === kind));
  const keys = used.map((kind) => el("li", {}, el("svg", { width: 14, height: 12, viewBox: "-7 -6 14 12", "aria-hidden": "true" },
    el("path", { class: `mark ${kind}`, d: SHAPES[kind] })), ` ${block.titles[kind]}`));
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": block.says }, ...parts);
  return el("div", { class: "timeline" }, ...(keys.length ? [el("ul", { class: "legend" }, ...keys)] : []), svg);
}

const MAKERS = {
  lines: makeLines, bars: makeBars, heat: makeHeat, gantt: makeGantt, controls: makeControls,
  verdicts: simple(verdictsOf), figures: simple(figuresOf), texts: simple(textsOf), banner: simple(bannerOf),
  mesh: simple(meshOf), timeline: simple(timelineOf), table: simple((block) => tableOf(block.table, block.title)), note: simple(() => []),
};
const HAS_NO_TWIN = new Set(["table", "verdicts", "figures"]); // they are words and cells already

let count = 0;

export function makeBlock(block, context) {
  if (block.kind === "heading") return { node: el("h2", { class: "heading" }, block.title), update() {}, end() {} };
  const body = MAKERS[block.kind](block, context);
  if (block.kind === "controls") {
    return { node: el("div", { class: "block controls" }, body.node), update: body.update, end: body.end };
  }
  count += 1;
  const id = `block-${count}`, says = el("p", { class: "says" }, block.says), title = el("h2", { id }, block.title);
  const holder = el("div"), twin = el("details", { open: block.is_open }, el("summary", {}, "Table"), holder);
  let shown = block, text = JSON.stringify(block);
  const fill = () => { if (twin.open) holder.replaceChildren(tableOf(shown.table, shown.title)); };
  twin.addEventListener("toggle", fill);
  fill();
  const hasTwin = block.table && !HAS_NO_TWIN.has(block.kind);
  const node = el("section", { class: `block ${block.kind}`, "aria-labelledby": id }, title, says, body.node, hasTwin ? twin : null);
  const mark = (next) => node.classList.toggle("nothing", next.verdicts?.[0].kind === "unknown");
  mark(block);
  return {
    node,
    update(next) {
      const fresh = JSON.stringify(next);
      if (fresh === text) return;
      text = fresh;
      shown = next;
      title.textContent = next.title;
      says.textContent = next.says;
      mark(next);
      body.update(next);
      fill();
    },
    end: body.end,
  };
}
