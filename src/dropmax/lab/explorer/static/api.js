// All requests of the page, to this server and no other. A refusal becomes an Error with the server's sentence.

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return ask(text ? `${path}?${text}` : path, { signal });
}

export async function post(path, body) {
  return ask(path, { method: "POST", body, headers: { "content-type": "application/octet-stream" } });
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The explorer does not answer. Is `dropmax explore` still running?");
  }
  let answer = null;
  try {
    answer = await response.json();
  } catch {
    // Not JSON: the server was too busy to be polite.
  }
  if (response.ok && answer !== null) return answer;
  throw new Error(answer?.error ?? "The explorer is busy: please try again in a moment.");
}
