// Try your own: a drawing, an image file or a sentence, and the model's answer beside it.

import { post } from "./api.js";
import { answerParts, answerSentence } from "./answer.js";
import { byId, h, say } from "./dom.js";
import { drawingPad } from "./pad.js";

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
    place.replaceChildren(h("p", { className: "failure", role: "alert" }, sentence));
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
      const time = h("p", { className: "hint" }, `Answered in ${milliseconds.toFixed(0)} ms.`);
      place.replaceChildren(h("h2", {}, "What the model says"), ...parts.filter(Boolean), time);
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
