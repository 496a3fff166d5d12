// Elements, colours and numbers that every drawing needs.  Text is only ever put in as text.

const SVG_TAGS = new Set(["svg", "g", "path", "rect", "line", "circle", "text", "title"]);

export function el(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Places in the palette (style.css) of what has the same meaning on several pages; others take what is left.
const PLACES = {
  computing: 0, forward: 0, measured: 0, "own time": 0, parameters: 0,
  backward: 1, gradients: 1, "forward and backward": 0,
  communication: 2, exposed: 2, "reducing gradients": 2, "gradients and parameters": 2, reduce: 2,
  "pipeline bubble": 3, filling: 3, waiting: 3, hidden: 3,
  "waiting for data": 4, optimizer: 5, "checkpoint, evaluation": 6, checkpoint: 6, evaluation: 6,
  "outside of phases": 7, "everything else": 7, "activations, process and the rest": 2, activations: 2,
  draining: 4, "unequal stages": 5,
};
const NUM_COLOURS = 10;

export function paletteOf(names) {
  const taken = new Set();
  const places = names.map((name) => {
    const place = PLACES[name];
    if (place === undefined || taken.has(place)) return null;
    taken.add(place);
    return place;
  });
  return places.map((place) => {
    if (place !== null) return place;
    let free = 0;
    while (taken.has(free) && free < NUM_COLOURS - 1) free += 1;
    taken.add(free);
    return free;
  });
}

export function figureOf(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : Math.min(6, 2 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

// A canvas as wide as its place, sharp on every screen, drawn anew when the place or the theme changes.
export function sheet(attributes, heightOf, draw) {
  const canvas = el("canvas", attributes);
  const place = el("div", { class: "sheet" }, canvas);
  const redraw = () => {
    const width = Math.floor(place.clientWidth);
    if (!width) return;
    const height = heightOf(width), ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = `11px ${colour("sans")}`;
    pen.textBaseline = "middle";
    draw(pen, width, height);
  };
  const observer = new ResizeObserver(() => requestAnimationFrame(redraw));
  observer.observe(place);
  return { place, canvas, redraw, end: () => observer.disconnect() };
}

// Round numbers between two ends, about `number` of them.
export function ticks(low, high, number) {
  const rough = (high - low) / Math.max(number, 1);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

export function trimmed(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
