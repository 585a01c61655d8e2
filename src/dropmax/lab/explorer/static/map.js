// The class map: what rho has learned beside what was answered, on two canvases with one cursor.

import { byId, count, get, h, number, percent } from "./page.js";

const SMALLEST_CELL = 3;
const AXIS = 16; // room for the name of an axis
const LABELLED = 13; // cells at least this large get the names of their classes
const NUMBERED = 30; // and these a number inside

export function mapView(about, openExamples) {
  let data = null;
  let at = null; // [row, column] of the cursor
  let shown = false;
  let lastTap = "";
  const panels = [];
  const layout = new Map(); // canvas -> where its cells lie, and its picture without the cursor
  let width = 0;

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paint());
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width === width) return; // the height follows from what is painted
    width = entry.contentRect.width;
    paint();
  }).observe(byId("view-map"));

  return async function show() {
    shown = true;
    if (data === null) {
      try {
        data = await get("/api/map");
      } catch (error) {
        byId("readout").textContent = error.message;
        return;
      }
      prepare();
    }
    paint();
  };

  function prepare() {
    const size = data.classes.length;
    const totals = data.counts.map((row) => row.reduce((sum, value) => sum + value, 0));
    data.totals = totals;
    const share = data.counts.map((row, i) => row.map((value) => (totals[i] ? value / totals[i] : null)));
    const off = (rows) => rows.flatMap((row, i) => (row ? row.filter((v, j) => i !== j && v !== null) : []));
    const rho = extremes(off(data.above));
    const most = extremes(off(share)).high;
    const span = rho.high - rho.low;
    panels.push(
      panel(byId("map-rho"), {
        shade: (i, j) => (data.above[i] === null ? null : rho.high > 1e-9 ? Math.max(0, data.above[i][j]) / rho.high : 0),
        text: (i, j) => (data.above[i] === null || i === j || data.above[i][j] < 0.0005 ? "" : signed(data.above[i][j])),
        across: "rival",
        open: (i, j) => openExamples({ true: data.classes[i], order: "attention", rival: data.classes[j] }),
      }),
      panel(byId("map-counts"), {
        shade: (i, j) => (share[i][j] === null ? null : most > 0 ? Math.sqrt(share[i][j] / most) : 0),
        text: (i, j) => (data.counts[i][j] ? String(data.counts[i][j]) : ""),
        across: "answer",
        open: (i, j) => openExamples({ true: data.classes[i], predicted: data.classes[j] }),
      }),
    );
    legend("legend-rho", "0 or below", `${signed(rho.high)} points`);
    legend("legend-counts", "0 %", percent(most));
    if (size < about.classes.length) {
      byId("readout").textContent =
        `Of ${count(about.classes.length)} classes, the ${size} with most confusions are shown.`;
    }
    if (span > 1e-9) pairs("pairs-rho", (i, j) => data.above[i]?.[j] ?? 0, signed, panels[0].open);
    else byId("pairs-rho").replaceChildren(h("li.hint", "Every ρ is the same."));
    pairs("pairs-counts", (i, j) => data.counts[i][j], (value) => count(value), panels[1].open);
  }

  function panel(canvas, { shade, text, open, across }) {
    const cellOf = (event) => {
      const { left, top } = canvas.getBoundingClientRect();
      const { margin, cell } = layout.get(canvas) ?? { margin: 0, cell: 1 };
      const row = Math.floor((event.clientY - top - margin) / cell);
      const column = Math.floor((event.clientX - left - margin) / cell);
      const size = data.classes.length;
      return row >= 0 && column >= 0 && row < size && column < size ? [row, column] : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch") move(cellOf(event));
    });
    canvas.addEventListener("click", (event) => {
      const cell = cellOf(event);
      if (cell === null) return;
      // A finger cannot point: its first tap reads the cell, the second opens it.
      const read = at !== null && at[0] === cell[0] && at[1] === cell[1] && lastTap === cell.join();
      lastTap = cell.join();
      if (event.pointerType === "touch" && !read) move(cell);
      else open(...cell);
    });
    canvas.addEventListener("keydown", (event) => {
      const [row, column] = at ?? [0, 0];
      const last = data.classes.length - 1;
      const target = {
        ArrowLeft: [row, column - 1],
        ArrowRight: [row, column + 1],
        ArrowUp: [row - 1, column],
        ArrowDown: [row + 1, column],
        Home: [row, 0],
        End: [row, last],
        PageUp: [row - 10, column],
        PageDown: [row + 10, column],
      }[event.key];
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        open(row, column);
      } else if (target) {
        event.preventDefault();
        const within = (value) => Math.min(last, Math.max(0, value));
        move(at === null ? [0, 0] : target.map(within));
      }
    });
    canvas.addEventListener("focus", () => {
      if (canvas.matches(":focus-visible")) move(at ?? [0, 0]);
    });
    return { canvas, shade, text, open, across };
  }

  function move(cell) {
    if (cell === null || (at && cell[0] === at[0] && cell[1] === at[1])) return;
    at = cell;
    const [i, j] = cell;
    const [truth, other] = [about.classes[data.classes[i]], about.classes[data.classes[j]]];
    const rho = data.rho[i] === null ? "no test examples" : `mean ρ ${number(data.rho[i][j], 3)}, ${signed(data.above[i][j])} points from its base rate`;
    const share = data.totals[i] ? ` (${percent(data.counts[i][j] / data.totals[i])})` : "";
    byId("readout").replaceChildren(
      h("b", truth),
      ...(i === j ? [" itself: "] : [" and ", h("b", other), ": "]),
      `${rho}; answered ${count(data.counts[i][j])} of ${count(data.totals[i])} times${share}.`,
    );
    for (const { canvas } of panels) paintCursor(canvas);
  }

  function paint() {
    if (!shown || data === null || byId("view-map").hidden) return;
    for (const each of panels) {
      paintCells(each);
      paintCursor(each.canvas);
    }
  }

  /** The cursor moves often and the cells do not change: they are kept as a picture. */
  function paintCursor(canvas) {
    const { picture, cell, edge, margin, scale } = layout.get(canvas);
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(picture, 0, 0);
    if (at === null) return;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const whole = edge(data.classes.length) - margin;
    const [x, y] = [edge(at[1]), edge(at[0])];
    const [across, down] = [edge(at[1] + 1) - x, edge(at[0] + 1) - y];
    context.strokeStyle = colour("--orange");
    context.lineWidth = cell >= 8 ? 2 : 1;
    if (cell < LABELLED) {
      // In a fine grid a single cell is lost: show its row and column too.
      context.globalAlpha = 0.6;
      context.strokeRect(margin, y - 0.5, whole, down + 1);
      context.strokeRect(x - 0.5, margin, across + 1, whole);
      context.globalAlpha = 1;
    }
    context.strokeRect(x - 0.5, y - 0.5, across + 1, down + 1);
  }

  function paintCells({ canvas, shade, text, across }) {
    const size = data.classes.length;
    const room = canvas.parentElement.clientWidth - 12; // its padding
    const names = data.classes.map((k) => about.classes[k]);
    const picture = document.createElement("canvas");
    const context = picture.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const widest = Math.min(84, Math.max(...names.map((name) => context.measureText(name).width)));
    const labelled = (room - widest - 10 - AXIS) / size >= LABELLED;
    const margin = labelled ? Math.ceil(Math.max(18, widest + 10)) + AXIS : AXIS;
    // Cells need not be whole pixels wide, but their edges are drawn on whole ones.
    const cell = Math.max(SMALLEST_CELL, Math.min(size < 5 ? 110 : 56, (room - margin - 2) / size));
    const edge = (k) => margin + Math.round(k * cell);
    const side = edge(size) + 2;
    const scale = devicePixelRatio || 1;
    layout.set(canvas, { picture, margin, cell, edge, scale });
    canvas.width = canvas.height = picture.width = picture.height = Math.round(side * scale);
    canvas.style.width = canvas.style.height = `${side}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const [low, high] = [rgb(colour("--map-low")), rgb(colour("--map-high"))];
    const [diagonal, muted] = [colour("--map-diagonal"), colour("--muted")];
    const gap = cell >= 8 ? 1 : 0;
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.font = `${cell >= 44 ? 12 : 11}px system-ui, sans-serif`;
    for (let i = 0; i < size; i++) {
      for (let j = 0; j < size; j++) {
        const value = shade(i, j);
        const [x, y] = [edge(j), edge(i)];
        const [width, height] = [edge(j + 1) - x - gap, edge(i + 1) - y - gap];
        const mixed = value === null ? null : low.map((l, c) => Math.round(l + (high[c] - l) * Math.min(1, value)));
        context.fillStyle = i === j || mixed === null ? diagonal : `rgb(${mixed.join(" ")})`;
        context.fillRect(x, y, width, height);
        if (cell >= NUMBERED) {
          const dark = i !== j && mixed !== null && 0.3 * mixed[0] + 0.59 * mixed[1] + 0.11 * mixed[2] < 140;
          context.fillStyle = i === j ? muted : dark ? "#fff" : "#1a1d21";
          context.fillText(text(i, j), x + width / 2, y + height / 2 + 0.5);
        }
      }
    }
    context.font = "600 11px system-ui, sans-serif";
    context.fillStyle = muted;
    context.textAlign = "center";
    context.fillText(across, (margin + edge(size)) / 2, AXIS / 2);
    context.save();
    context.translate(AXIS / 2, (margin + edge(size)) / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("true class", 0, 0);
    context.restore();
    if (labelled) {
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = muted;
      names.forEach((name, k) => {
        const middle = margin + k * cell + (cell - gap) / 2;
        context.textAlign = "right";
        context.fillText(fitted(context, name, widest), margin - 6, middle);
        context.save();
        context.translate(middle, margin - 6);
        if (widest > cell - 2) {
          context.rotate(-Math.PI / 2);
          context.textAlign = "left";
          context.fillText(fitted(context, name, widest), 0, 0);
        } else {
          context.textAlign = "center";
          context.fillText(name, 0, -4);
        }
        context.restore();
      });
    }
  }

  function pairs(id, valueOf, spell, open) {
    const found = data.classes.flatMap((_, i) => data.classes.map((__, j) => [i === j ? 0 : valueOf(i, j), i, j]));
    found.sort((a, b) => b[0] - a[0]);
    const rows = found
      .slice(0, 8)
      .filter(([value]) => value > 0)
      .map(([value, i, j]) => {
        const [truth, other] = [about.classes[data.classes[i]], about.classes[data.classes[j]]];
        const names = h("span.pair-names", h("b", truth), " → ", h("b", other));
        const press = { type: "button", onclick: () => open(i, j) };
        return h("li", h("button.pair", press, names, h("span.num", spell(value))));
      });
    byId(id).replaceChildren(...(rows.length ? rows : [h("li.hint", "There is none.")]));
  }
}

/** A difference of probabilities in points: hundredths. */
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(100 * value).toFixed(1)}`;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function extremes(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low <= high ? { low, high } : { low: 0, high: 0 };
}

function rgb(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

function fitted(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

function legend(id, low, high) {
  byId(id).replaceChildren(h("span.num", low), h("i.ramp"), h("span.num", high));
}
