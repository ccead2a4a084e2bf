// The page's life: asks the router every two seconds while somebody looks, and shows what it says.

import { ask, hasKey, useKey } from "./api.js";
import { show } from "./dom.js";
import * as views from "./views.js";

const PAUSE_MS = 2000;
const PAUSE_MS_MAX = 30_000;

const part = (id) => document.getElementById(id);
const seen = { summary: null, conversations: null, problems: {}, heardAt: null };
const view = { filter: "", open: null, traceUrl: "" };
let paused = false;
let timer = 0;
let asking = false;
let failures = 0;

/** Asks one question and keeps the answer; a refusal is kept beside it. */
async function learn(name, question) {
  try {
    seen[name] = await question();
    seen.problems[name] = null;
    return true;
  } catch (error) {
    seen.problems[name] = error;
    if (error.status) seen[name] = null; // Refused. Without an answer the last one is still shown.
    return Boolean(error.status);
  }
}

async function learnOpen() {
  const open = view.open;
  if (!open) return;
  const [tenant, model, name] = JSON.parse(open.key);
  const query = { model, ...(seen.conversations?.all_tenants === false ? {} : { tenant }) };
  try {
    open.answer = await ask(`conversations/${encodeURIComponent(name)}`, query);
    open.problem = "";
  } catch (error) {
    open.problem = error.message;
  }
}

/** One round of questions, one after the other: of several processes the same one then answers. */
async function round() {
  if (asking || paused || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  try {
    const reached = await learn("summary", () => ask("summary"));
    if (reached) await learn("conversations", () => ask("conversations"));
    if (reached) await learnOpen();
    if (reached) seen.heardAt = Date.now();
    failures = reached ? 0 : failures + 1;
  } finally { // Whatever could not be taken or drawn: the next round may bring what can.
    asking = false;
    again();
  }
  draw();
}

function again() {
  clearTimeout(timer);
  if (!paused && !document.hidden) timer = setTimeout(round, Math.min(PAUSE_MS * 2 ** failures, PAUSE_MS_MAX));
}

function draw() {
  const { summary, conversations, problems } = seen;
  view.traceUrl = summary?.router.trace_url ?? view.traceUrl;
  show(part("notices"), views.notices(noticed()));
  drawState();
  for (const name of ["reuse", "engines", "verdicts"]) {
    if (summary) show(part(name), views[name](summary));
    else if (problems.summary) show(part(name), views.notShown(problems.summary));
  }
  drawConversations();
  if (needsKey() && !hasKey()) openKeyForm(true);
}

function drawConversations() {
  if (seen.conversations) show(part("conversations"), views.conversations(seen.conversations, view));
  else if (seen.problems.conversations) show(part("conversations"), views.notShown(seen.problems.conversations));
}

function drawState() {
  const heardS = seen.heardAt === null ? null : (Date.now() - seen.heardAt) / 1000;
  show(part("state"), views.state(seen.summary, { paused, heardS }));
}

const needsKey = () => [seen.problems.summary, seen.problems.conversations].some((problem) => problem?.status === 401);

function noticed() {
  const { summary, conversations, problems } = seen;
  const list = [];
  if (problems.summary && !problems.summary.status) list.push(["bad", `${problems.summary.message} What is shown is what it said last.`]);
  if (needsKey()) list.push(["", hasKey() ? "This key does not open all of this page; an operator's key does." : "This router asks for a key."]);
  const lease = summary?.lease_service;
  if (lease && !lease.answers) {
    list.push(["bad", `${lease.problem} Turns are served and recomputed meanwhile (asked: ${lease.endpoints.join(", ")}). ` +
      "Engines are shown as this process sees them, without their memory."]);
  }
  if (conversations?.problem) list.push(["", "Conversations are those that this process served last, not all."]);
  if (summary?.router.one_of_several) {
    list.push(["", "Several processes answer at this address. Turns, state and load are of the one that answered; " +
      "conversations and KV memory are the lease service's, of all."]);
  }
  return list;
}

function openKeyForm(opened) {
  part("key-form").hidden = !opened;
  part("key-button").setAttribute("aria-expanded", String(opened));
}

function openConversation(key) {
  view.open = view.open?.key === key ? null : { key, answer: null, problem: "" };
  drawConversations();
  if (!view.open) part(`open ${key}`)?.focus();
  else learnOpen().then(drawConversations);
}

part("conversations").addEventListener("click", (event) => {
  const button = event.target.closest("[data-open]");
  if (button) openConversation(button.dataset.open);
});
part("filter").addEventListener("input", (event) => {
  view.filter = event.target.value;
  drawConversations();
});
part("pause").addEventListener("click", () => {
  paused = !paused;
  part("pause").setAttribute("aria-pressed", String(paused));
  drawState();
  round();
});
part("key-button").addEventListener("click", () => {
  openKeyForm(part("key-form").hidden);
  if (!part("key-form").hidden) part("key").focus();
});
part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(part("key").value.trim());
  part("key").value = "";
  openKeyForm(false);
  round();
});
part("forget").addEventListener("click", () => {
  useKey("");
  Object.assign(seen, { summary: null, conversations: null });
  view.open = null;
  round();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : round()));
setInterval(() => document.hidden || drawState(), 1000);
round();
