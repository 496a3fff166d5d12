// The page: where one is (its address), the stream that belongs to it, and the blocks that it is made of.
import { makeBlock } from "./blocks.js";
import { el } from "./dom.js";

const SAY_EVERY_MS = 5_000;
const SILENT_MS = 4_000;
const STATES = { running: "running", ended: "has ended", lost: "its process is gone", unknown: "not running" };
const byId = (id) => document.getElementById(id);
const kept = byId("kept") ? withAll(JSON.parse(byId("kept").textContent)) : null; // a report has its pages inside

const context = { link, navigate: kept ? null : navigate, page: "", options: {} };
let stream = null, isPaused = false, drawn = new Map(), newest = null;

// A report has one page more, with the blocks of all others: for printing.
function withAll(pages) {
  const blocks = Object.values(pages).flatMap((page) => [
    { kind: "heading", title: page.title, key: page.id }, ...page.blocks.map((block, at) => ({ ...block, key: `${page.id}:${at}` })),
  ]);
  return { ...pages, all: { ...pages.overview, id: "all", title: "All pages", blocks } };
}

function place() {
  const [page, query] = location.hash.replace(/^#\/?/, "").split("?");
  const options = Object.fromEntries(new URLSearchParams(query || ""));
  return { page: page || "overview", options };
}

function link(page, options) {
  const run = place().options.run;
  const query = new URLSearchParams({ ...(run ? { run } : {}), ...options }).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

function navigate(page, options) {
  const to = link(page, page === place().page ? { ...place().options, ...options } : options);
  if (to === location.hash) open();
  else location.hash = to;
}

function open() {
  stream?.close();
  stream = null;
  const { page, options } = place();
  if (kept) {
    show(kept[page] || kept.overview);
    return;
  }
  const query = new URLSearchParams({ ...options, page }).toString();
  if (isPaused) {
    fetch(`view?${query}`).then((answer) => answer.json()).then(show);
    return;
  }
  // A browser has six connections to a server for all its tabs: a hidden tab gives its own back.
  if (document.hidden) return;
  stream = new EventSource(`stream?${query}`);
  stream.addEventListener("page", (event) => {
    const began = performance.now();
    show(JSON.parse(event.data));
    document.documentElement.dataset.drawMs = (performance.now() - began).toFixed(1);
  });
  let heardAt = performance.now();
  stream.addEventListener("open", () => { heardAt = performance.now(); });
  stream.addEventListener("error", () => {
    // A stream beyond those that the server holds ends at once, and is asked for again: that is no error.
    if (stream?.readyState === EventSource.CLOSED || performance.now() - heardAt > SILENT_MS) showLost();
  });
}

function showLost() {
  const told = "weft watch does not answer: it has ended, or the connection is lost";
  byId("now").replaceChildren(el("span", { class: "dot lost", "aria-hidden": "true" }), told);
  say(told, true);
}

function show(page) {
  newest = page;
  const { options } = place();
  document.title = `${page.title} · ${page.run} · weft`;
  byId("title").textContent = page.title;
  byId("now").replaceChildren(el("span", { class: `dot ${page.state}`, "aria-hidden": "true" }),
    `${STATES[page.state]}, step ${page.step.toLocaleString("en-US")}`);
  showRuns(page, options);
  showPages(page);
  showBlocks(page, options);
  const first = page.blocks.find((block) => block.kind === "banner") || page.blocks.find((block) => block.kind === "verdicts");
  const told = first ? (first.verdicts ? first.verdicts[0].title : first.says) : "";
  say(`${page.title}: run ${STATES[page.state]}. ${told}`);
}

function showRuns(page, options) {
  const holder = byId("runs"), runs = page.runs || [{ name: page.run }];
  const key = JSON.stringify([runs, options.run]);
  if (holder.dataset.key === key) return;
  holder.dataset.key = key;
  if (runs.length < 2) {
    holder.replaceChildren(page.run);
    return;
  }
  const list = el("select", { "aria-label": "run", onchange: (event) => navigate(place().page, { run: event.target.value }) });
  runs.forEach((run, at) => list.append(el("option", { value: String(at), selected: String(at) === (options.run || "0") }, run.name)));
  holder.replaceChildren(list);
}

function showPages(page) {
  const holder = byId("pages"), pages = Object.entries(page.pages || Object.fromEntries(Object.values(kept).map((each) => [each.id, each.title])));
  if (holder.children.length !== pages.length) {
    holder.replaceChildren(...pages.map(([id, title]) => el("li", {}, el("a", { "data-page": id }, title))));
  }
  for (const anchor of holder.querySelectorAll("a")) {
    anchor.setAttribute("href", link(anchor.dataset.page, {}));
    if (anchor.dataset.page === page.id) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
}

function showBlocks(page, options) {
  const holder = byId("blocks");
  if (page.id !== context.page || options.run !== context.options.run) clear();
  Object.assign(context, { page: page.id, options });
  const now = new Map();
  for (const block of page.blocks) {
    const key = block.key || `${block.kind}:${block.title}`, known = drawn.get(key);
    if (known) known.update(block);
    now.set(key, known || makeBlock(block, context));
  }
  for (const [key, made] of drawn) if (!now.has(key)) made.end();
  const nodes = [...now.values()].map((made) => made.node);
  // Only where something came or went: moving an element takes the focus from it.
  if (nodes.length !== holder.children.length || nodes.some((node, at) => node !== holder.children[at])) holder.replaceChildren(...nodes);
  drawn = now;
  pair(page.blocks, nodes);
}

// Charts stand in pairs; one that is left over is as wide as the page.
function pair(blocks, nodes) {
  let run = [];
  [...blocks, { kind: "" }].forEach((block, at) => {
    if (block.kind === "lines") {
      run.push(nodes[at]);
      return;
    }
    run.forEach((node, place) => node.classList.toggle("wide", run.length % 2 === 1 && place === run.length - 1));
    run = [];
  });
}

function clear() {
  for (const made of drawn.values()) made.end();
  drawn = new Map();
  byId("blocks").replaceChildren();
}

let saidAt = -SAY_EVERY_MS, said = "", waiting = 0;
function say(text, isNow = false) {
  if (text === said) return;
  clearTimeout(waiting);
  const pause = isNow ? 0 : Math.max(0, saidAt + SAY_EVERY_MS - performance.now());
  waiting = setTimeout(() => {
    saidAt = performance.now();
    said = text;
    byId("status").textContent = text;
  }, pause);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  if (newest) {
    clear();
    show(newest);
  }
}

const preferred = matchMedia("(prefers-color-scheme: dark)");
const chosenTheme = () => { try { return localStorage.getItem("weft-theme"); } catch { return null; } };
setTheme(chosenTheme() || (preferred.matches ? "dark" : "light"));
preferred.addEventListener("change", () => { if (!chosenTheme()) setTheme(preferred.matches ? "dark" : "light"); });
byId("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("weft-theme", theme); } catch { /* it is chosen again in the next tab */ }
  setTheme(theme);
});
byId("pause").hidden = Boolean(kept);
byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.target.setAttribute("aria-pressed", String(isPaused));
  event.target.textContent = isPaused ? "Go on" : "Pause";
  open();
});
document.addEventListener("visibilitychange", open);
addEventListener("hashchange", () => {
  const isNew = place().page !== context.page;
  open();
  if (isNew) {
    byId("main").focus({ preventScroll: true });
    scrollTo(0, 0);
  }
});
if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is a cookie by now
open();
