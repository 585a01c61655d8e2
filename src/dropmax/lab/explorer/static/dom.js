// Small helpers to build the page. Text only ever becomes text nodes: a class named "<script>" is shown, not run.

export const byId = (id) => document.getElementById(id);

/** Make an element: h("p", { className: "hint", "aria-label": "..." }, "text", child, ...). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Tell screen readers something that is otherwise only seen. */
export function say(text) {
  byId("live").textContent = text;
}

export const number = (value, digits = 3) => value.toFixed(digits);
export const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
export const count = (value) => value.toLocaleString("en-GB");

export const isNarrow = () => matchMedia("(max-width: 860px)").matches;
export const scrollBehaviour = () =>
  matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
