// Try your own: a drawing, an image file or a sentence, and the model's answer beside it.

import { answerParts, answerSentence } from "./answer.js";
import { byId, h, post, say } from "./page.js";

const SIDE = 280; // of the drawing, one byte per pixel
const INK = 22;
const MOST_POINTS = 20000;

export function tryView(about) {
  const place = byId("answer");
  const empty = byId("answer-empty");
  let ask = null; // asks again for what is shown, with another seed
  let latest = 0;

  byId("drawing").hidden = !about.drawing;
  byId("uploading").hidden = !about.uploads;
  byId("writing").hidden = !about.sentences;
  if (!about.drawing && !about.uploads && !about.sentences) {
    const refusal = byId("no-try");
    refusal.hidden = false;
    refusal.textContent =
      "This model takes rows of features, not images, so there is nothing to draw or drop. " +
      "`dropmax predict RUN FILE` answers for a table (.npz, .csv, .parquet).";
    byId("answer").hidden = true;
  }
  byId("uploading").querySelector("h2").textContent = about.drawing ? "Or an image of yours" : "An image of yours";
  const { bytes, pixels, formats } = about.limits;
  byId("limits").textContent =
    `${formats.join(", ")}; up to ${Math.round(bytes / 2 ** 20)} MB and ${Math.round(pixels / 1e6)} million pixels. ` +
    "It stays on the machine that runs the explorer and is not stored.";
  byId("file").accept = formats.map((format) => `image/${format.toLowerCase()}`).join(",");
  byId("prepare-row").hidden = !about.drawing;

  function refuse(sentence) {
    latest += 1;
    ask = null;
    place.replaceChildren(h("p.failure", { role: "alert" }, sentence));
  }

  async function answer(request, seed = 0) {
    const mine = ++latest;
    const started = performance.now();
    try {
      const found = await request(seed);
      if (mine !== latest) return;
      ask = (other) => answer(request, other);
      const parts = answerParts(about, found, null, () => {
        ask(seed + 1).then(() => place.querySelector(".classes button")?.focus());
      });
      const milliseconds = performance.now() - started;
      const time = h("p.hint", `Answered in ${milliseconds.toFixed(0)} ms.`);
      place.replaceChildren(h("h2", "What the model says"), ...parts.filter(Boolean), time);
      place.dataset.milliseconds = String(milliseconds);
      say(answerSentence(about, found));
    } catch (error) {
      if (mine === latest) refuse(error.message);
    }
  }

  /** While one answer is on its way, drawing or writing goes on; only the newest state is asked about next. */
  function follow(isEmpty, content, address) {
    let working = false;
    let changed = false;
    return async () => {
      changed = true;
      if (working) return;
      working = true;
      while (changed) {
        changed = false;
        if (isEmpty()) {
          latest += 1;
          place.replaceChildren(empty);
        } else {
          const body = content();
          await answer((seed) => post(`${address}?seed=${seed}`, body));
        }
      }
      working = false;
    };
  }

  if (about.drawing) {
    const pad = drawingPad(follow(() => pad.isEmpty(), () => pad.pixels(), "/api/try/drawing"));
  }
  const sentence = byId("sentence");
  sentence.addEventListener("input", follow(() => !sentence.value.trim(), () => sentence.value, "/api/try/text"));

  async function upload(file) {
    if (!file) return;
    if (file.size > bytes) {
      refuse(`That file is too large: the limit is ${Math.round(bytes / 2 ** 20)} MB.`);
      return;
    }
    const prepare = about.drawing && byId("prepare").checked ? "mnist" : "none";
    await answer((seed) => post(`/api/try/image?prepare=${prepare}&seed=${seed}`, file));
  }

  let lastFile = null;
  const choose = (file) => {
    lastFile = file;
    return upload(file);
  };
  byId("file").addEventListener("change", (event) => {
    choose(event.target.files[0]);
    event.target.value = ""; // the same file may be chosen again
  });
  byId("prepare").addEventListener("change", () => upload(lastFile));
  const drop = byId("drop");
  for (const kind of ["dragenter", "dragover"]) {
    drop.addEventListener(kind, () => drop.classList.add("over"));
  }
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => choose(event.dataTransfer?.files[0]));
  // A file dropped beside the field must not replace the page.
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault());

  return () => {};
}

/** The drawing pad: white ink on black, by mouse, finger or keys. Calls `onChange` while drawing and after a stroke. */
function drawingPad(onChange) {
  const pad = byId("pad");
  const within = (value) => Math.min(SIDE, Math.max(0, value));
  const ink = pad.getContext("2d", { willReadFrequently: true });
  const overlay = byId("pen").getContext("2d");
  let strokes = []; // each a list of points
  let pen = { x: SIDE / 2, y: SIDE / 2, down: false };
  let drawing = false;

  function paint() {
    ink.fillStyle = "#000";
    ink.fillRect(0, 0, SIDE, SIDE);
    ink.strokeStyle = ink.fillStyle = "#fff";
    ink.lineWidth = INK;
    ink.lineCap = ink.lineJoin = "round";
    for (const points of strokes) {
      ink.beginPath();
      ink.moveTo(points[0].x, points[0].y);
      for (const point of points) ink.lineTo(point.x, point.y);
      if (points.length === 1) ink.lineTo(points[0].x + 0.01, points[0].y);
      ink.stroke();
    }
  }

  function paintPen() {
    overlay.clearRect(0, 0, SIDE, SIDE);
    if (!pad.matches(":focus-visible")) return;
    overlay.strokeStyle = pen.down ? "#e69f00" : "#56b4e9";
    overlay.lineWidth = 3;
    overlay.beginPath();
    overlay.arc(pen.x, pen.y, INK / 2 + 2, 0, 7);
    overlay.stroke();
  }

  function add(point, fresh) {
    if (strokes.reduce((sum, points) => sum + points.length, 0) >= MOST_POINTS) return;
    if (fresh) strokes.push([point]);
    else strokes.at(-1).push(point);
    paint();
  }

  function place(event) {
    const box = pad.getBoundingClientRect();
    return {
      x: within(((event.clientX - box.left) / box.width) * SIDE),
      y: within(((event.clientY - box.top) / box.height) * SIDE),
    };
  }

  pad.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    pad.setPointerCapture(event.pointerId);
    drawing = true;
    add(place(event), true);
  });
  pad.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    for (const part of event.getCoalescedEvents?.() ?? [event]) add(place(part), false);
    onChange();
  });
  for (const end of ["pointerup", "pointercancel"]) {
    pad.addEventListener(end, () => {
      if (!drawing) return;
      drawing = false;
      onChange();
    });
  }

  pad.addEventListener("keydown", (event) => {
    const step = event.shiftKey ? 3 : 12;
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    const move = moves[event.key];
    if (move) {
      pen.x = within(pen.x + move[0]);
      pen.y = within(pen.y + move[1]);
      if (pen.down) {
        add({ x: pen.x, y: pen.y }, false);
        onChange();
      }
    } else if (event.key === " ") {
      pen.down = !pen.down;
      say(pen.down ? "Pen down" : "Pen up");
      if (pen.down) add({ x: pen.x, y: pen.y }, true);
      onChange();
    } else if (event.key === "Backspace") {
      keep(strokes.slice(0, -1));
    } else if (event.key === "Delete") {
      keep([]);
    } else {
      return;
    }
    event.preventDefault();
    paintPen();
  });
  for (const happening of ["focus", "blur"]) pad.addEventListener(happening, paintPen);

  function keep(some) {
    strokes = some;
    pen.down = false;
    paint();
    onChange();
  }

  byId("undo").addEventListener("click", () => keep(strokes.slice(0, -1)));
  byId("clear").addEventListener("click", () => keep([]));
  paint();
  return {
    isEmpty: () => strokes.length === 0,
    /** One byte a pixel: how much ink. */
    pixels() {
      const { data } = ink.getImageData(0, 0, SIDE, SIDE);
      const bytes = new Uint8Array(SIDE * SIDE);
      for (let i = 0; i < bytes.length; i++) bytes[i] = data[4 * i];
      return bytes;
    },
  };
}
