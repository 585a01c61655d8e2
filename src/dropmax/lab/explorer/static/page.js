// What every view uses: requests to this server and no other, and small helpers to build the page.

export async function get(path, parameters = {}, signal = undefined) {
  const text = query(parameters);
  return ask(text ? `${path}?${text}` : path, { signal });
}

export async function post(path, body) {
  return ask(path, { method: "POST", body, headers: { "content-type": "application/octet-stream" } });
}

/** Parameters as text, without those that are empty. */
export function query(parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return new URLSearchParams(given).toString();
}

/** A refusal becomes an Error with the server's sentence. */
async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The explorer does not answer. Is `dropmax explore` still running?");
  }
  const answer = await response.json().catch(() => null); // not JSON: the server was too busy to be polite
  if (response.ok && answer !== null) return answer;
  throw new Error(answer?.error ?? "The explorer is busy: please try again in a moment.");
}

export const byId = (id) => document.getElementById(id);

/**
 * Make an element: h("p.hint", { "aria-label": "..." }, "text", child, ...). The properties may be left out, and
 * children that are null too. Text only ever becomes text nodes: a class named "<script>" is shown, not run.
 */
export function h(name, ...parts) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const properties = parts[0]?.constructor === Object ? parts.shift() : {};
  for (const [key, value] of Object.entries(properties)) {
    if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...parts.filter((child) => child !== null && child !== undefined));
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
export const scrollBehaviour = () => (matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth");
