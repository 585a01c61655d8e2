// One answer of the model: the image it saw, what it says and how sure, and every class with its masks.

import { h, number } from "./dom.js";

/** Build the parts of an answer; `about` is the run, `truth` a class or null. */
export function answerParts(about, answer, truth, onOtherMasks) {
  const name = (k) => about.classes[k];
  const right = truth === null ? null : answer.predicted === truth;
  const verdict = h(
    "div",
    { className: "verdict" },
    h("p", { className: "eyebrow" }, about.beside ? `${about.head} says` : "The answer"),
    h("p", { className: "says" }, name(answer.predicted)),
    h("p", { className: "sure" }, h("b", {}, number(answer.probability))),
    truth === null
      ? null
      : h(
          "p",
          { className: right ? "truth right" : "truth wrong" },
          right ? "✓ which is right" : `✗ the truth is ${name(truth)}`,
        ),
  );
  const seen = answer.image
    ? h("img", { className: photo(about, "seen"), src: answer.image, alt: "What the network sees" })
    : answer.text
      ? h("blockquote", { className: "sentence", dir: "auto" }, answer.text)
      : h("div", { className: "seen features", "aria-hidden": "true" }, "features");
  return [
    h("div", { className: answer.text ? "answer-head of-text" : "answer-head" }, seen, verdict, answer.beside ? besideVerdict(about, answer, truth, name) : null),
    couldBe(about, answer, name),
    classTable(about, answer, truth, name, onOtherMasks),
  ];
}

/** Pixels of a small image are to be told apart; those of a photograph are not. */
export function photo(about, name) {
  return about.shape.length < 3 || about.shape[2] > 64 ? `${name} photo` : name;
}

/** What the second run says of the same input. */
function besideVerdict(about, answer, truth, name) {
  const { predicted, probability } = answer.beside;
  return h(
    "div",
    { className: "verdict beside" },
    h("p", { className: "eyebrow" }, `${about.beside.head} says`),
    h("p", { className: "says" }, name(predicted)),
    h("p", { className: "sure" }, h("b", {}, number(probability))),
    truth === null ? null : h("p", { className: predicted === truth ? "truth right" : "truth wrong" }, predicted === truth ? "✓" : "✗"),
  );
}

/** The same answer in a sentence, for screen readers. */
export function answerSentence(about, answer) {
  return `${about.classes[answer.predicted]}, probability ${number(answer.probability, 2)}: ${answer.words}.`;
}

/** What else it could be: the state in words, the classes of the prediction set, and what promises them. */
function couldBe(about, answer, name) {
  const chips = answer.set.map((member) =>
    h(
      "li",
      {},
      h("b", {}, name(member.class)),
      h("span", {}, ` ${number(member.p, 2)}${about.masks === "none" ? "" : `, ρ\u00a0${number(member.rho, 2)}`}`),
    ),
  );
  const promise = about.coverage
    ? `Sets like this one hold the truth in ${Math.round(100 * about.coverage)} % of cases.`
    : "The run is not calibrated, so nothing is promised about this set.";
  return h(
    "div",
    { className: `could-be ${answer.state}` },
    h("h3", {}, "What else could it be?"),
    h("p", { className: "state" }, answer.words[0].toUpperCase() + answer.words.slice(1), "."),
    chips.length ? h("ul", { className: "chips" }, ...chips) : null,
    h("p", { className: "hint" }, promise),
  );
}

function classTable(about, answer, truth, name, onOtherMasks) {
  const drawn = answer.masks.length > 0;
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "Class"),
    h("th", { scope: "col" }, "Probability"),
    h("th", { scope: "col" }, h("abbr", { title: "retain probability" }, "ρ")),
    drawn ? h("th", { scope: "col" }, h("abbr", { title: "in how many of the masks drawn at random the class is kept" }, "Kept in draws")) : null,
  );
  const rows = answer.rows.map((row, place) => {
    const kinds = [row.class === answer.predicted ? "is-answer" : "", row.class === truth ? "is-truth" : ""];
    const marks = row.class === truth ? h("span", { className: "mark", title: "the truth" }, "truth") : null;
    return h(
      "tr",
      { className: kinds.join(" ").trim() },
      h(
        "th",
        { scope: "row", title: name(row.class) },
        h("span", { className: "who" }, h("span", { className: "name" }, name(row.class)), marks),
      ),
      h(
        "td",
        {},
        h("span", { className: "value" }, number(row.p)),
        bar(row.p),
        answer.beside ? besideBar(about, answer.beside.rows[place]) : null,
      ),
      h("td", {}, h("span", { className: "value" }, number(row.rho, 2)), bar(row.rho, "rho")),
      drawn ? h("td", {}, dots(row.kept)) : null,
    );
  });
  const foot = drawn
    ? h(
        "tfoot",
        {},
        h(
          "tr",
          {},
          h(
            "td",
            { colSpan: 4 },
            masksSentence(answer.masks, name),
            ` Over all masks, the probability of ${name(answer.predicted)} has a standard deviation of ${number(answer.std, 2)}. `,
            otherMasks(onOtherMasks),
          ),
        ),
      )
    : null;
  const omitted = about.classes.length - answer.rows.length;
  return h(
    "div",
    { className: "classes" },
    h("table", {}, h("thead", {}, head), h("tbody", {}, ...rows), foot),
    omitted > 0 ? h("p", { className: "hint" }, `The other ${omitted} classes matter less here.`) : null,
  );
}

function besideBar(about, value) {
  if (value === null) return null;
  return h("span", { className: "beside-row", title: about.beside.head }, bar(value, "other"), h("span", { className: "dim" }, number(value, 2)));
}

function bar(value, kind = "") {
  const filled = h("i", { className: "fill" });
  filled.style.width = `${100 * value}%`;
  return h("span", { className: `bar ${kind}`.trim(), "aria-hidden": "true" }, filled);
}

function dots(kept) {
  const label = `kept in ${kept.filter(Boolean).length} of ${kept.length} draws`;
  const marks = kept.map((is) => h("i", { className: is ? "kept" : "dropped" }));
  const dotted = h("span", { className: "dots", "aria-hidden": "true" }, ...marks);
  return h("span", { title: label }, h("span", { className: "value" }, `${kept.filter(Boolean).length} of ${kept.length}`), dotted);
}

function masksSentence(masks, name) {
  const votes = new Map();
  for (const mask of masks) votes.set(mask.class, (votes.get(mask.class) ?? 0) + 1);
  const told = [...votes].sort((a, b) => b[1] - a[1]).map(([k, times]) => `${name(k)} in ${times} of ${masks.length} draws`);
  return `With these masks the answer is ${told.join(", ")}.`;
}

function otherMasks(onOtherMasks) {
  return h("button", { type: "button", className: "quiet small", onclick: onOtherMasks }, "Draw other masks");
}
