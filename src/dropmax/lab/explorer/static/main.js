// The page: asks what the run is, then shows the view the address names after its "#".

import { examplesView } from "./examples.js";
import { mapView } from "./map.js";
import { byId, count, get, percent, query } from "./page.js";
import { tryView } from "./tryout.js";

const NOTES = {
  none: "This head has no masks: every ρ is 1, and no masks are drawn.",
  training: "This head drops classes at random while training only: ρ is one fixed number, and its prediction draws nothing.",
  gate: "This head computes its ρ as a gate and never draws masks: its prediction does not vary.",
};

const NUMBERS = ["true", "predicted", "rival", "page", "index"];
const ORDERS = ["closest", "hardest", "easiest", "attention", "differ"];
const TITLES = { examples: "Examples", try: "Try your own", map: "Class map" };

/** Read "#view?name=value&…", keeping only what a view can use. */
function readAddress() {
  const [view, text = ""] = location.hash.slice(1).split("?", 2);
  const asked = new URLSearchParams(text);
  const parameters = {};
  for (const name of NUMBERS) {
    const value = asked.get(name);
    if (value !== null && /^\d{1,9}$/.test(value)) parameters[name] = value;
  }
  if (ORDERS.includes(asked.get("order"))) parameters.order = asked.get("order");
  return { view, parameters };
}

function navigate(view, parameters) {
  const kept = query(Object.fromEntries([...NUMBERS, "order"].map((name) => [name, parameters[name]])));
  const hash = kept ? `#${view}?${kept}` : `#${view}`;
  if (location.hash === hash) route();
  else location.hash = hash;
}

let views = {};
let run = "";
let shown = null; // the view

function route() {
  const { view, parameters } = readAddress();
  const chosen = view in views ? view : "examples";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === chosen) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const name of Object.keys(views)) byId(`view-${name}`).hidden = name !== chosen;
  document.title = `${TITLES[chosen]} · ${run} · dropmax explorer`;
  const moved = shown !== null && shown !== chosen;
  shown = chosen;
  // What had the focus may just have been hidden, as a cell of the map: then it moves on to the view that is shown.
  Promise.resolve(views[chosen](parameters)).then(() => {
    if (moved && (document.activeElement === document.body || document.activeElement.closest("[hidden]"))) {
      (chosen === "examples" ? byId("grid").querySelector('[tabindex="0"]') ?? byId("main") : byId("main")).focus();
    }
  });
}

async function start() {
  const about = await get("/api/about");
  const kind = about.examples === 1 ? "example" : "examples";
  byId("summary").textContent =
    `${about.head} on ${about.data} · ${about.network} · ${count(about.examples)} test ${kind} · ` +
    `error ${percent(about.error, 2)}`;
  run = about.run;
  if (about.beside) {
    const { head, error, differ } = about.beside;
    byId("summary").textContent += ` · beside it ${head} (${about.beside.run}), error ${percent(error, 2)}; ` +
      `${count(differ)} answers differ`;
  }
  if (about.masks in NOTES) {
    byId("note").textContent = NOTES[about.masks];
    byId("note").hidden = false;
  }
  views = {
    examples: examplesView(about, (parameters) => navigate("examples", parameters)),
    try: tryView(about),
    map: mapView(about, (parameters) => navigate("examples", parameters)),
  };
  addEventListener("hashchange", route);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address already says which view is shown
    byId("main").focus();
  });
  route();
}

start().catch((error) => {
  byId("failure").textContent = error.message;
  byId("failure").hidden = false;
});
