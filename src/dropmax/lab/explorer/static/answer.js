// One answer of the model: the image it saw, what it says and how sure, and every class with its masks.

import { h, number } from "./page.js";

/** Build the parts of an answer; `about` is the run, `truth` a class or null. */
export function answerParts(about, answer, truth, onOtherMasks) {
  const name = (k) => about.classes[k];
  const seen = answer.image
    ? h("img", { className: photo(about, "seen"), src: answer.image, alt: "What the network sees" })
    : answer.text
      ? h("blockquote.sentence", { dir: "auto" }, answer.text)
      : h("div.seen.features", { "aria-hidden": "true" }, "features");
  const says = about.beside ? `${about.head} says` : "The answer";
  const { beside } = answer;
  return [
    h(
      answer.text ? "div.answer-head.of-text" : "div.answer-head",
      seen,
      verdict("", says, answer, truth, name, ["✓ which is right", `✗ the truth is ${name(truth)}`]),
      beside ? verdict(".beside", `${about.beside.head} says`, beside, truth, name, ["✓", "✗"]) : null,
    ),
    couldBe(about, answer, name),
    classTable(about, answer, truth, name, onOtherMasks),
  ];
}

/** What a run says of the input, and whether that is right. */
function verdict(kind, says, { predicted, probability }, truth, name, [right, wrong]) {
  return h(
    `div.verdict${kind}`,
    h("p.eyebrow", says),
    h("p.says", name(predicted)),
    h("p.sure", h("b", number(probability))),
    truth === null ? null : predicted === truth ? h("p.truth.right", right) : h("p.truth.wrong", wrong),
  );
}

/** Pixels of a small image are to be told apart; those of a photograph are not. */
export function photo(about, name) {
  return about.shape.length < 3 || about.shape[2] > 64 ? `${name} photo` : name;
}

/** The same answer in a sentence, for screen readers. */
export function answerSentence(about, answer) {
  return `${about.classes[answer.predicted]}, probability ${number(answer.probability, 2)}: ${answer.words}.`;
}

/** What else it could be: the state in words, the classes of the prediction set, and what promises them. */
function couldBe(about, answer, name) {
  const chips = answer.set.map(({ class: k, p, rho }) => {
    const attention = about.masks === "none" ? "" : `, ρ\u00a0${number(rho, 2)}`;
    return h("li", h("b", name(k)), h("span", ` ${number(p, 2)}${attention}`));
  });
  const promise = about.coverage
    ? `Sets like this one hold the truth in ${Math.round(100 * about.coverage)} % of cases.`
    : "The run is not calibrated, so nothing is promised about this set.";
  return h(
    `div.could-be.${answer.state}`,
    h("h3", "What else could it be?"),
    h("p.state", answer.words[0].toUpperCase() + answer.words.slice(1), "."),
    chips.length ? h("ul.chips", ...chips) : null,
    h("p.hint", promise),
  );
}

function classTable(about, answer, truth, name, onOtherMasks) {
  const drawn = answer.masks.length > 0;
  const explained = (title, text) => h("abbr", { title }, text);
  const titles = ["Class", "Probability", explained("retain probability", "ρ")];
  if (drawn) titles.push(explained("in how many of the masks drawn at random the class is kept", "Kept in draws"));
  const rows = answer.rows.map((row, place) => {
    const kinds = [row.class === answer.predicted ? "is-answer" : "", row.class === truth ? "is-truth" : ""];
    const mark = row.class === truth ? h("span.mark", { title: "the truth" }, "truth") : null;
    const other = answer.beside ? besideBar(about, answer.beside.rows[place]) : null;
    return h(
      "tr",
      { className: kinds.join(" ").trim() },
      h("th", { scope: "row", title: name(row.class) }, h("span.who", h("span.name", name(row.class)), mark)),
      h("td", h("span.value", number(row.p)), bar(row.p), other),
      h("td", h("span.value", number(row.rho, 2)), bar(row.rho, ".rho")),
      drawn ? h("td", dots(row.kept)) : null,
    );
  });
  const spread = `the probability of ${name(answer.predicted)} has a standard deviation of ${number(answer.std, 2)}`;
  const again = h("button.quiet.small", { type: "button", onclick: onOtherMasks }, "Draw other masks");
  const words = h("td", { colSpan: 4 }, masksSentence(answer.masks, name), ` Over all masks, ${spread}. `, again);
  const omitted = about.classes.length - answer.rows.length;
  return h(
    "div.classes",
    h(
      "table",
      h("thead", h("tr", ...titles.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", ...rows),
      drawn ? h("tfoot", h("tr", words)) : null,
    ),
    omitted > 0 ? h("p.hint", `The other ${omitted} classes matter less here.`) : null,
  );
}

function besideBar(about, value) {
  if (value === null) return null;
  return h("span.beside-row", { title: about.beside.head }, bar(value, ".other"), h("span.dim", number(value, 2)));
}

function bar(value, kind = "") {
  const filled = h("i.fill");
  filled.style.width = `${100 * value}%`;
  return h(`span.bar${kind}`, { "aria-hidden": "true" }, filled);
}

function dots(kept) {
  const times = `${kept.filter(Boolean).length} of ${kept.length}`;
  const marks = kept.map((is) => h(is ? "i.kept" : "i.dropped"));
  const dotted = h("span.dots", { "aria-hidden": "true" }, ...marks);
  return h("span", { title: `kept in ${times} draws` }, h("span.value", times), dotted);
}

function masksSentence(masks, name) {
  const votes = new Map();
  for (const mask of masks) votes.set(mask.class, (votes.get(mask.class) ?? 0) + 1);
  const ordered = [...votes].sort((a, b) => b[1] - a[1]);
  const told = ordered.map(([k, times]) => `${name(k)} in ${times} of ${masks.length} draws`);
  return `With these masks the answer is ${told.join(", ")}.`;
}
