// One step as lanes of spans: the plan's above, those that were measured below, on one axis of time.
import { colour, el, figureOf, paletteOf, sheet, ticks, trimmed } from "./dom.js";

const LANE = 24, GAP = 5, BOTTOM = 26, LEFT = 118, BETWEEN = 14;

export function makeGantt(block) {
  let shown = block, cursor = null;
  const legend = el("ul", { class: "legend" }), readout = el("p", { class: "readout" });
  const numPlanned = () => shown.lanes.filter((lane) => lane.planned).length;
  const isApart = () => numPlanned() > 0 && numPlanned() < shown.lanes.length;
  const heightOf = () => shown.lanes.length * (LANE + GAP) + BOTTOM + (isApart() ? BETWEEN : 0);
  const drawn = sheet({ tabindex: 0, role: "application", "aria-roledescription": "schedule" }, heightOf, draw);

  function topOf(lane) {
    return lane * (LANE + GAP) + (isApart() && lane >= numPlanned() ? BETWEEN : 0);
  }

  function draw(pen, width, height) {
    const scale = (width - LEFT - 10) / shown.end, ink = colour("ink"), soft = colour("soft"), line = colour("line");
    const places = paletteOf(shown.kinds), fills = places.map((place) => colour(`c${place}`));
    pen.strokeStyle = line;
    pen.fillStyle = soft;
    pen.textAlign = "center";
    for (const at of ticks(0, shown.end, (width - LEFT) / 110)) {
      const x = LEFT + at * scale;
      pen.fillRect(x, 0, 0.5, height - BOTTOM + 4);
      pen.fillText(`${figureOf(at)} ${shown.unit}`, Math.min(x, width - 24), height - 10);
    }
    shown.lanes.forEach((lane, number) => {
      const top = topOf(number);
      pen.globalAlpha = 1;
      pen.fillStyle = soft;
      pen.textAlign = "right";
      pen.fillText(trimmed(pen, lane.name, LEFT - 12), LEFT - 8, top + LANE / 2);
      pen.fillStyle = colour("faint");
      pen.fillRect(LEFT, top, width - LEFT - 10, LANE);
      pen.textAlign = "center";
      for (const [kind, start, stop, microbatch] of lane.spans) {
        const x = LEFT + start * scale, long = Math.max((stop - start) * scale, 0.7), waits = shown.kinds[kind] === "waiting";
        pen.globalAlpha = lane.planned ? 0.55 : 1;
        pen.fillStyle = fills[kind];
        pen.fillRect(x, waits ? top + LANE - 7 : top, Math.max(long - 0.6, 0.6), waits ? 7 : LANE);
        if (microbatch >= 0 && long > 13) {
          pen.globalAlpha = 1;
          pen.fillStyle = lane.planned ? ink : [0, 5, 9].includes(places[kind]) ? colour("bar-ink") : "#15191c";
          pen.fillText(String(microbatch), x + long / 2, top + LANE / 2);
        }
      }
    });
    pen.globalAlpha = 1;
    if (isApart()) {
      pen.fillStyle = line;
      pen.fillRect(0, topOf(numPlanned()) - BETWEEN / 2 - GAP / 2, width, 1);
    }
    if (cursor) {
      const [, start, stop] = shown.lanes[cursor.lane].spans[cursor.span];
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(LEFT + start * scale, topOf(cursor.lane), Math.max((stop - start) * scale, 2), LANE);
    }
  }

  function show(lane, span) {
    cursor = { lane, span };
    const [kind, start, stop, microbatch] = shown.lanes[lane].spans[span];
    readout.textContent = `${shown.lanes[lane].name}: ${shown.kinds[kind]}${microbatch >= 0 ? `, microbatch ${microbatch}` : ""}, ` +
      `${figureOf(stop - start)} ${shown.unit}, from ${figureOf(start)} to ${figureOf(stop)} ${shown.unit}`;
    drawn.redraw();
  }

  drawn.canvas.addEventListener("mousemove", (event) => {
    const box = drawn.canvas.getBoundingClientRect(), y = event.clientY - box.top;
    const time = ((event.clientX - box.left - LEFT) / (box.width - LEFT - 10)) * shown.end;
    const lane = shown.lanes.findIndex((_, at) => y >= topOf(at) && y < topOf(at) + LANE);
    if (lane < 0) return;
    const span = shown.lanes[lane].spans.findLastIndex((each) => time >= each[1] && time <= each[2]);
    if (span >= 0) show(lane, span);
  });
  drawn.canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }, move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const from = cursor || { lane: 0, span: -1 };
    const lane = Math.max(0, Math.min(shown.lanes.length - 1, from.lane + move[0]));
    const last = shown.lanes[lane].spans.length - 1;
    if (last >= 0) show(lane, Math.max(0, Math.min(last, from.span + move[1])));
  });

  function label() {
    const places = paletteOf(shown.kinds);
    legend.replaceChildren(...shown.kinds.map((kind, at) => el("li", {}, el("i", { class: `p${places[at]}` }), kind)));
    drawn.canvas.setAttribute("aria-label", `${shown.title}. Arrow keys move from span to span.`);
  }
  label();
  return {
    node: el("div", {}, legend, drawn.place, readout),
    update(next) {
      shown = next;
      cursor = null;
      label();
      drawn.redraw();
    },
    end: drawn.end,
  };
}
