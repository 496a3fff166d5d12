// Lines over steps, by uPlot.
import uPlot from "./uPlot.js";
import { colour, el, figureOf, paletteOf } from "./dom.js";

const HEIGHT = 210;
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3], [1, 3]];

export function makeLines(block) {
  const place = el("div", { class: "sheet", "aria-hidden": "true" });
  let plot = null, shown = block, theme = "";

  function dataOf() {
    const level = shown.level ? [shown.x.map(() => shown.level.value)] : [];
    return [shown.x, ...shown.series.map((series) => series.values), ...level];
  }

  function shapeOf(other) {
    return JSON.stringify([other.series.map((series) => series.name), other.unit, other.level?.name]);
  }

  function build() {
    plot?.destroy();
    theme = document.documentElement.dataset.theme;
    const ink = colour("soft"), grid = { stroke: colour("line"), width: 1 }, ticks = { stroke: colour("line"), width: 1, size: 4 };
    const unit = shown.unit ? ` ${shown.unit}` : "";
    const font = `11px ${colour("sans")}`;
    const places = paletteOf(shown.series.map((series) => series.name));
    const series = shown.series.map((each, at) => ({
      label: each.name, stroke: colour(`c${places[at]}`), width: 1.6, dash: DASHES[at % DASHES.length], spanGaps: true,
      points: { show: shown.x.length < 25, size: 5 }, value: (_, value) => (value === null ? "–" : figureOf(value) + unit),
    }));
    if (shown.level) {
      series.push({ label: shown.level.name, stroke: colour("ink"), width: 1.2, dash: [4, 4], points: { show: false },
                    value: (_, value) => (value === null ? "–" : figureOf(value) + unit) });
    }
    plot = new uPlot({
      width: Math.max(place.clientWidth, 200), height: HEIGHT, padding: [10, 12, 0, 0],
      scales: { x: { time: false } },
      axes: [
        { stroke: ink, grid, ticks, font, size: 32, space: 70, values: (_, all) => all.map((value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : "")) },
        { stroke: ink, grid, ticks, font, size: (_, texts) => Math.max(44, 14 + 6.2 * Math.max(0, ...(texts || []).map((text) => text.length))), values: (_, all) => all.map((value) => (value === null ? "" : figureOf(value) + unit)) },
      ],
      series: [{ label: shown.x_name, value: (_, value) => (value === null ? "–" : value.toLocaleString("en-US")) }, ...series],
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      legend: { markers: { width: 0, fill: (self, at) => self.series[at].stroke() } },
      hooks: { draw: [drawMarks], ready: [(self) => self.setLegend({ idx: shown.x.length - 1 }, false)] },
    }, dataOf(), place);
  }

  function drawMarks(self) {
    const pen = self.ctx, ratio = window.devicePixelRatio || 1, { left, top, width, height } = self.bbox;
    pen.save();
    pen.font = `${10 * ratio}px ${colour("sans")}`;
    pen.textAlign = "left";
    pen.strokeStyle = pen.fillStyle = colour("soft");
    pen.setLineDash([3 * ratio, 3 * ratio]);
    for (const mark of shown.marks) {
      const x = self.valToPos(mark.x, "x", true);
      if (x < left || x > left + width) continue;
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.fillText(mark.label, x + 4 * ratio, top + 8 * ratio);
    }
    pen.restore();
  }

  const observer = new ResizeObserver(() => {
    if (!place.clientWidth) return;
    if (plot) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    else build();
  });
  observer.observe(place);
  return {
    node: place,
    update(next) {
      const same = plot && shapeOf(next) === shapeOf(shown) && theme === document.documentElement.dataset.theme;
      shown = next;
      if (same) {
        plot.setData(dataOf());
        if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: shown.x.length - 1 }, false);
      } else if (plot) build();
    },
    end() {
      observer.disconnect();
      plot?.destroy();
    },
  };
}
