// The drawing pad: white ink on black, by mouse, finger or keys. Calls `onChange` after every stroke and while drawing.

import { byId, say } from "./dom.js";

export const SIDE = 280;
const INK = 22;
const MOST_POINTS = 20000;

export function drawingPad(onChange) {
  const pad = byId("pad");
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
    const within = (value) => Math.min(SIDE, Math.max(0, value));
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
      pen.x = Math.min(SIDE, Math.max(0, pen.x + move[0]));
      pen.y = Math.min(SIDE, Math.max(0, pen.y + move[1]));
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
      undo();
    } else if (event.key === "Delete") {
      clear();
    } else {
      return;
    }
    event.preventDefault();
    paintPen();
  });
  for (const happening of ["focus", "blur"]) pad.addEventListener(happening, paintPen);

  function undo() {
    strokes.pop();
    pen.down = false;
    paint();
    onChange();
  }

  function clear() {
    strokes = [];
    pen.down = false;
    paint();
    onChange();
  }

  byId("undo").addEventListener("click", undo);
  byId("clear").addEventListener("click", clear);
  paint();
  return {
    isEmpty: () => strokes.length === 0,
    clear,
    /** One byte a pixel: how much ink. */
    pixels() {
      const { data } = ink.getImageData(0, 0, SIDE, SIDE);
      const bytes = new Uint8Array(SIDE * SIDE);
      for (let i = 0; i < bytes.length; i++) bytes[i] = data[4 * i];
      return bytes;
    },
  };
}
