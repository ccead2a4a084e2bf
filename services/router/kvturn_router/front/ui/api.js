// Questions to the router that served this page. A key goes in the header alone, and stays in this tab.

const KEPT = "kvturn.key";
const PATIENCE_MS = 10_000;

/** What the router refused or failed to answer; status 0 if there was no answer. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = sessionStorage.getItem(KEPT) ?? "";

export function hasKey() {
  return key !== "";
}

/** Keeps a key for this tab; "" forgets it. */
export function useKey(given) {
  key = given;
  if (key) sessionStorage.setItem(KEPT, key);
  else sessionStorage.removeItem(KEPT);
}

/** Returns the JSON of a route under kvturn/v1/, with such a query. Throws Refusal. */
export async function ask(route, query = {}) {
  const url = new URL(`kvturn/v1/${route}`, document.baseURI);
  for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  let answer, body;
  try {
    answer = await fetch(url, { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    body = await answer.json();
  } catch (error) {
    throw new Refusal(answer?.status ?? 0, `The router does not answer (${error.name}).`);
  }
  if (!answer.ok) throw new Refusal(answer.status, body.error?.message ?? `The router answered ${answer.status}.`);
  return body;
}
