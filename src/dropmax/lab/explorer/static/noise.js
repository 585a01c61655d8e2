// The noise slider of an example: the same noise made louder, and how the answer fades with it.

import { get, h, number, say, svg } from "./page.js";

const [WIDTH, HEIGHT] = [400, 136];
const [LEFT, RIGHT, TOP, BOTTOM] = [30, 8, 8, 10];

/** Build the panel; `onLevel(level)` is called when the slider moves, and returns once the answer is shown. */
export function noisePanel(about, index, onLevel) {
  const range = { type: "range", min: "0", max: "1", step: "0.05", value: "0" };
  const slider = h("input", { ...range, id: "noise", "aria-describedby": "noise-said" });
  const value = h("output", { htmlFor: "noise" }, "0.00");
  const said = h("p.hint", { id: "noise-said" }, "Move the slider to add noise.");
  const place = h("div.chart");
  const unit = about.images ? "of the range of a pixel" : "of each feature’s standard deviation";
  const label = h("label.slider", { htmlFor: "noise" }, h("span", `Noise, ${unit}`), value);
  const control = h("div.noise-control", label, slider);
  const title = "What noise does to the answer";
  const panel = h("section.noise", { "aria-label": title }, h("h3", title), place, said);

  let curve = null;
  let marker = null;
  get(`/api/examples/${index}/noise`).then(
    (found) => {
      curve = found;
      const drawn = chart(found);
      marker = drawn.marker;
      place.replaceChildren(drawn.picture);
      place.after(key(about, found.answer));
      show();
    },
    (error) => {
      said.textContent = error.message;
    },
  );

  function show() {
    const level = Number(slider.value);
    value.textContent = number(level, 2);
    if (curve === null) return;
    const x = horizontal(level);
    marker.setAttribute("x1", x);
    marker.setAttribute("x2", x);
    const at = curve.levels.findIndex((other) => Math.abs(other - level) < 1e-6);
    if (at >= 0) {
      said.textContent =
        `“${about.classes[curve.answer]}” has probability ${number(curve.probability[at], 2)}; ` +
        `uncertainty ${number(curve.entropy[at], 2)}.`;
    }
  }

  // Only the last position counts: while one answer is on its way, later ones replace each other.
  let working = false;
  let wanted = null;
  slider.addEventListener("input", async () => {
    show();
    wanted = Number(slider.value);
    if (working) return;
    working = true;
    while (wanted !== null) {
      const level = wanted;
      wanted = null;
      await onLevel(level);
    }
    working = false;
  });
  slider.addEventListener("change", () => say(said.textContent));
  return { control, chart: panel };
}

const horizontal = (level) => LEFT + level * (WIDTH - LEFT - RIGHT);
const vertical = (value) => TOP + (1 - value) * (HEIGHT - TOP - BOTTOM);

function chart(curve) {
  const line = (values) => values.map((v, i) => `${horizontal(curve.levels[i])},${vertical(v)}`);
  const parts = [];
  for (const value of [0, 0.5, 1]) {
    parts.push(
      svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: vertical(value), y2: vertical(value) }),
      svg("text", { x: LEFT - 6, y: vertical(value) + 3.5, "text-anchor": "end" }, String(value)),
    );
  }
  parts.push(
    svg("polyline", { class: "entropy", points: line(curve.entropy).join(" ") }),
    svg("polyline", { class: "probability", points: line(curve.probability).join(" ") }),
  );
  const marker = svg("line", { class: "marker", x1: LEFT, x2: LEFT, y1: TOP, y2: HEIGHT - BOTTOM });
  parts.push(marker);
  const label = "Probability of the answer and its uncertainty against the strength of the noise";
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, ...parts);
  return { picture, marker };
}

function key(about, answer) {
  return h(
    "p.key",
    h("span", h("i.key-probability"), `probability of “${about.classes[answer]}”`),
    h("span", h("i.key-entropy"), "uncertainty: entropy, as a share of the largest possible"),
  );
}
