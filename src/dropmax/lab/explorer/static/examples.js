// Browse the test examples: filters, a grid to walk with the arrow keys, and the chosen one in detail.

import { answerParts, answerSentence, photo } from "./answer.js";
import { noisePanel } from "./noise.js";
import { byId, count, get, h, isNarrow, number, say, scrollBehaviour } from "./page.js";

export function examplesView(about, navigate) {
  const grid = byId("grid");
  const detail = byId("detail");
  const usual = about.beside ? "differ" : "closest";
  let state = {};
  let shownList = null; // the filters and page the grid shows
  let shownIndex = null;
  let sentence = ""; // what screen readers hear of it
  let listing = null; // aborts the request before
  let order = 0; // numbers the requests for details: a late answer must not replace a newer one

  grid.classList.toggle("long-names", about.classes.some((name) => name.length > 5));
  fillSelect(byId("filter-true"), about.classes);
  fillSelect(byId("filter-predicted"), about.classes);

  byId("filters").addEventListener("change", () => {
    const [kind, rival] = byId("filter-order").value.split(" ");
    navigate({
      true: byId("filter-true").value,
      predicted: byId("filter-predicted").value,
      order: kind,
      rival: kind === "attention" ? rival : "",
    });
  });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filter-clear").addEventListener("click", () => navigate({}));
  byId("previous").addEventListener("click", () => navigate({ ...state, index: "", page: state.pageShown - 1 }));
  byId("next").addEventListener("click", () => navigate({ ...state, index: "", page: state.pageShown + 1 }));
  grid.addEventListener("keydown", walk);

  return async function show(parameters) {
    state = { ...parameters };
    byId("filter-true").value = parameters.true ?? "";
    byId("filter-predicted").value = parameters.predicted ?? "";
    fillOrder(parameters);
    byId("filter-clear").hidden = !["true", "predicted", "rival"].some((name) => name in parameters);
    const wanted = JSON.stringify([parameters.true, parameters.predicted, parameters.order, parameters.rival, parameters.page]);
    if (wanted !== shownList) {
      const found = await list(parameters);
      if (found === null) return;
      shownList = wanted;
    }
    state.pageShown = Number(grid.dataset.page);
    // A close call that is answered right shows most: which rival came near, and that it was told apart.
    const first = grid.querySelector("button:not(.wrong)") ?? grid.querySelector("button");
    if (parameters.index !== undefined) {
      await open(Number(parameters.index), true);
    } else if (!isNarrow() && first) {
      await open(Number(first.dataset.index), false);
    } else {
      shownIndex = null;
      detail.hidden = true;
    }
  };

  function fillOrder(parameters) {
    const select = byId("filter-order");
    const options = [
      ...(about.beside ? [["differ", "where the runs differ"]] : []),
      ["closest", "closest calls"],
      ["hardest", "hardest"],
      ["easiest", "easiest"],
    ];
    if (parameters.rival !== undefined) {
      options.push([`attention ${parameters.rival}`, `by ρ of ${about.classes[parameters.rival] ?? "?"}`]);
    }
    select.replaceChildren(...options.map(([value, text]) => h("option", { value }, text)));
    select.value = parameters.order === "attention" ? `attention ${parameters.rival}` : (parameters.order ?? usual);
  }

  async function list(parameters) {
    listing?.abort();
    listing = new AbortController();
    grid.setAttribute("aria-busy", "true");
    try {
      const { true: truth, predicted, order: by, rival, page } = parameters;
      const found = await get("/api/examples", { true: truth, predicted, order: by ?? usual, rival, page }, listing.signal);
      grid.replaceChildren(...found.examples.map(tile));
      grid.dataset.page = found.page;
      grid.querySelector("button")?.setAttribute("tabindex", "0");
      const what = found.total === 1 ? "example" : "examples";
      const below = `Below each: its class, the answer, and ${rival === undefined ? "the probability of its class" : "ρ"}.`;
      byId("count").textContent = found.total ? `${count(found.total)} ${what}. ${below}` : "No test example is like this.";
      byId("page-number").textContent = `${count(found.page)} of ${count(found.pages)}`;
      byId("previous").disabled = found.page <= 1;
      byId("next").disabled = found.page >= found.pages;
      byId("grid").closest(".browser").querySelector(".pager").hidden = found.pages <= 1;
      say(`${byId("count").textContent} Page ${found.page} of ${found.pages}`);
      return found;
    } catch (error) {
      if (error.name === "AbortError") return null;
      grid.replaceChildren();
      shownList = null;
      byId("count").textContent = error.message;
      return null;
    } finally {
      grid.removeAttribute("aria-busy");
    }
  }

  function tile(example) {
    const wrong = example.true !== example.predicted;
    const [truth, answer] = [about.classes[example.true], about.classes[example.predicted]];
    const label =
      `Example ${example.index}: ${truth}, ${wrong ? `taken for ${answer}` : "answered right"}, ` +
      `probability of the truth ${number(example.truth, 2)}`;
    const value = example.attention === undefined ? number(example.truth, 2) : `ρ ${number(example.attention, 2)}`;
    const picture = example.image
      ? h("img", { className: photo(about, ""), src: example.image, alt: "" })
      : example.text
        ? h("span.placeholder.words", { dir: "auto" }, example.text)
        : h("span.placeholder", `#${example.index}`);
    const properties = {
      type: "button",
      "aria-label": label,
      title: label,
      tabIndex: -1,
      "data-index": example.index,
      onclick: () => navigate({ ...state, index: example.index }),
    };
    const text = h("span.tile-text", h("span.tile-answer", wrong ? `✗ ${answer}` : "✓"), h("span.num", value));
    return h("li", h(wrong ? "button.tile.wrong" : "button.tile", properties, picture, h("b", truth), text));
  }

  async function open(index, explicit) {
    for (const button of grid.querySelectorAll("button")) {
      if (Number(button.dataset.index) === index) {
        button.setAttribute("aria-current", "true");
        for (const other of grid.querySelectorAll("button")) other.tabIndex = -1;
        button.tabIndex = 0;
        if (explicit && !isNarrow()) button.scrollIntoView({ behavior: scrollBehaviour(), block: "nearest" });
      } else button.removeAttribute("aria-current");
    }
    if (shownIndex === index) {
      if (explicit) say(sentence);
      return;
    }
    const mine = ++order;
    const settings = { noise: 0, seed: index }; // masks and noise of its own for each example
    const top = h("div.answer-top");
    const place = h("div.answer-place");

    async function refresh() {
      try {
        const answer = await get(`/api/examples/${index}`, settings);
        if (mine !== order) return;
        const [head, ...parts] = answerParts(about, answer, answer.true, () => {
          settings.seed += 1;
          refresh().then(() => place.querySelector(".classes button")?.focus());
        });
        top.replaceChildren(head);
        place.replaceChildren(...parts.filter(Boolean));
        return answer;
      } catch (error) {
        if (mine === order) place.replaceChildren(h("p.failure", error.message));
      }
    }

    const answer = await refresh();
    if (mine !== order) return;
    shownIndex = index;
    detail.hidden = false;
    const leave = { type: "button", onclick: () => navigate({ ...state, index: "" }) };
    const back = h("button.quiet.back", leave, "Back to all");
    detail.replaceChildren(h("header", h("h2", `Example ${count(index)}`), back), top, place);
    if (!answer) return;
    const noise = noisePanel(about, index, async (level) => {
      settings.noise = level;
      await refresh();
    });
    top.after(noise.control); // right below the picture it changes
    detail.append(noise.chart);
    sentence = `Example ${index}. ${answerSentence(about, answer)}`;
    if (explicit) say(sentence);
    if (explicit && isNarrow()) {
      detail.scrollIntoView({ behavior: scrollBehaviour(), block: "start" });
      detail.focus({ preventScroll: true });
    }
  }

  /** Arrow keys move through the grid, up and down by rows as they happen to be laid out. */
  function walk(event) {
    const buttons = [...grid.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    if (at < 0) return;
    const top = buttons[0].offsetTop;
    const beyond = buttons.findIndex((button) => button.offsetTop > top);
    const columns = beyond < 0 ? buttons.length : beyond;
    const steps = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns };
    const target = { ...steps, Home: 0, End: buttons.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const next = buttons[target];
    if (!next) return;
    for (const button of buttons) button.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function fillSelect(select, classes) {
  const options = classes.map((name, k) => h("option", { value: String(k) }, name));
  select.replaceChildren(h("option", { value: "" }, "any"), ...options);
}
