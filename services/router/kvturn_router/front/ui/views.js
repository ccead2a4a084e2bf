// What is seen: functions from the router's answers to elements. None keeps anything.

import { el } from "./dom.js";
import { ago, compact, count, milliseconds, percent, plural, span } from "./units.js";
import { expected, plan, verdict } from "./words.js";

const quiet = (...text) => el("p", { class: "quiet" }, ...text);
const badge = (word, tone) => el("span", { class: `badge ${tone}` }, word);
const id = (text) => el("bdi", {}, text);

/** A bar of parts [name, size], over `all` of them; its text says the same. */
function bar(parts, all, label, kind = "") {
  let from = 0;
  const rects = parts.map(([name, size]) => {
    const width = all > 0 ? (100 * size) / all : 0;
    const rect = el("rect", { class: name, x: from.toFixed(3), y: 0, width: width.toFixed(3), height: 10 });
    from += width;
    return rect;
  });
  return el("svg", { class: `bar ${kind}`, viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label }, rects);
}

function legend(parts, unit) {
  return el("ul", { class: "legend" }, parts.map(([name, size]) => el("li", { class: name }, `${compact(size)} ${name}`)),
    unit ? el("li", { class: "unit" }, unit) : null);
}

// Roles are said, though they are a table's own: on narrow screens its cells are laid out as blocks.
function table(caption, heads, rows) {
  return el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": caption }, el("table", { role: "table" },
    el("caption", {}, caption),
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" },
      heads.map(([text, kind]) => el("th", { scope: "col", role: "columnheader", class: kind }, text)))),
    el("tbody", { role: "rowgroup" }, rows)));
}

/** A row of a table with such heads; the first cell names it. */
function row(key, heads, ...cells) {
  return el("tr", { role: "row", "data-key": key }, cells.map((content, place) => {
    const [label, kind] = heads[place];
    return place
      ? el("td", { role: "cell", class: kind, "data-label": label }, content)
      : el("th", { scope: "row", role: "rowheader", class: kind }, content);
  }));
}

/** The line in the page's head. */
export function state(summary, { paused, heardS }) {
  const heard = heardS === null ? "waiting for the router" : paused ? `paused, as of ${ago(heardS)}` : `as of ${ago(heardS)}`;
  if (!summary) return [el("span", { class: "quiet" }, heard)];
  const { router, lease_service: lease } = summary;
  const reuse = { lease: null, stock: "reuse by stock handles", none: "no lease service: nothing is reused" }[router.reuse];
  return [
    badge(router.draining ? "shutting down" : "router up", router.draining ? "warn" : "good"),
    lease ? badge(lease.answers ? "lease service answers" : "lease service silent", lease.answers ? "good" : "bad") : badge(reuse, "warn"),
    el("span", {}, `${plural(router.turns_in_flight, "turn")} in flight`),
    el("span", { class: "quiet" }, `process ${router.process}, up ${span(router.up_s)}`),
    el("span", { class: "quiet" }, heard),
  ];
}

/** Notices: [kind, text] pairs. */
export const notices = (list) => list.map(([kind, text]) => el("p", { class: `notice ${kind}` }, text));

/** What stands in place of a part that the router does not show. */
export const notShown = (problem) => quiet(problem.status === 401 ? "A key that may see this opens it." : problem.message);

/** The headline. */
export function reuse(summary) {
  const { recent, router } = summary;
  const scope = router.one_of_several ? "this process, one of several of this router," : "this router process";
  const about = quiet(`Turns that ${scope} served in the last ${span(recent.span_s)}` +
    (recent.turns >= recent.turns_max ? `, of those the latest ${count(recent.turns_max)}.` : "."));
  if (!recent.turns) return [about, el("p", {}, "There was none."), firstTurn()];
  const computed = Math.max(0, recent.prompt_tokens - recent.reused_tokens - recent.local_tokens);
  const parts = [["reused", recent.reused_tokens], ["local", recent.local_tokens], ["computed", computed]];
  const share = percent(recent.prompt_tokens - computed, recent.prompt_tokens);
  return [
    el("div", { class: "figures" },
      el("div", { class: "figure" }, el("span", {}, "Prompt tokens that were not computed"), el("strong", {}, share),
        bar(parts, recent.prompt_tokens, `Of ${count(recent.prompt_tokens)} prompt tokens ${share} were not computed`, "tall"),
        legend(parts, "prompt tokens")),
      firstByte("Median time to first token, with reuse", recent.with_reuse),
      firstByte("… without reuse", recent.without_reuse)),
    quiet("Reused: read from decode. Local: found in the cache of the engine that computed the rest. ",
      "Times are of streamed answers; turns with reuse have other prompts than those without."),
    about,
  ];
}

function firstByte(title, { turns, median_ms: median }) {
  return el("div", { class: "figure" }, el("span", {}, title), el("strong", {}, median === null ? "–" : milliseconds(median)),
    el("span", { class: "quiet small" }, median === null ? "no streamed turn" : `of ${plural(turns, "turn")}`));
}

function firstTurn() {
  return el("p", {}, "To make one: ", el("code", {}, ".venv/bin/kvturn chat"), ", or post a chat to ",
    el("code", {}, new URL("v1/chat/completions", document.baseURI).href),
    ", then send its answer back with the next question.");
}

const ENGINE = [["Engine", "name"], ["Role"], ["State", "state"], ["In flight", "number"], ["KV memory", "bars"], ["Heartbeat", "number"], ["Conversations held", "number"]];

/** The engines. */
export function engines(summary) {
  const { engines: all, lease_service: lease } = summary;
  if (!all.length) {
    return [el("p", {}, "No engine is known."), quiet(lease
      ? "Engines announce themselves to the lease service, if their connector knows kvturn_http_address; or name them by --prefill and --decode."
      : "Name engines by --prefill and --decode.")];
  }
  const sorted = [...all].sort((one, other) => rank(one).localeCompare(rank(other), "en", { numeric: true }));
  return [table(`${plural(all.length, "engine")}; state and load as this process sees them, memory as the lease service does`,
    ENGINE, sorted.map((engine) => engineRow(engine, lease)))];
}

const rank = (engine) => [engine.role === "prefill" ? 0 : 1, engine.sessions[0]?.engine_id ?? "", engine.url].join(" ");

function engineRow(engine, lease) {
  const { sessions, url } = engine;
  return row(`${url} ${engine.named_by.join(" ")}`, ENGINE,
    [sessions.map((one) => el("div", {}, id(one.engine_id))), el("div", { class: "quiet small" }, id(url || "no address"))],
    engine.role || "none",
    engineState(engine),
    count(engine.in_flight),
    sessions.length ? sessions.map(memory) : el("span", { class: "quiet small" }, withoutSession(lease)),
    sessions.length ? sessions.map(heartbeat) : "–",
    sessions.length ? count(sessions.reduce((sum, one) => sum + one.leases, 0)) : "–");
}

function heartbeat(session) {
  const parts = [ago(session.heartbeat_age_s)];
  if (session.expired_sessions) {
    const title = "sessions lost: it was silent for the session TTL, and what it held could not be read until it had a new one";
    parts.push(el("div", { class: "quiet small", title }, `${count(session.expired_sessions)} expired, ${ago(session.last_expiry_age_s)}`));
  }
  return el("div", {}, parts);
}

function engineState(engine) {
  const parts = [engine.usable ? badge(engine.draining ? "draining" : "usable", engine.draining ? "warn" : "good") : badge("not usable", "bad")];
  if (!engine.usable && engine.draining) parts.push(" ", badge("draining", "warn"));
  if (engine.reason) parts.push(el("div", { class: "quiet small" }, engine.reason));
  return parts;
}

function withoutSession(lease) {
  if (!lease) return "not known without a lease service";
  if (!lease.answers) return "not known while the lease service is silent";
  return "no session with the lease service: the engine has no connector, or cannot reach it";
}

function memory(session) {
  const { total_blocks: total, free_blocks: free, retained_blocks: retained, block_size: size } = session;
  if (!total) return el("span", { class: "quiet small" }, "it has not told yet");
  const unit = size || 1;
  const active = Math.max(0, total - free - retained);
  const parts = [["active", active * unit], ["retained", retained * unit], ["free", free * unit]];
  const label = `Of ${count(total)} blocks ${count(active)} are active, ${count(retained)} retained, ${count(free)} free`;
  return el("div", { title: label }, bar(parts, total * unit, label), legend(parts, size ? "" : "blocks"));
}

const VERDICT = [["Verdict"], ["Turns", "number"], ["Computed tokens", "number"], ["What it means, and what helps", "words"]];

/** The verdicts of recent turns. */
export function verdicts(summary) {
  const { recent } = summary;
  if (!recent.turns) return [quiet(`No turn in the last ${span(recent.span_s)}.`)];
  const rows = recent.verdicts.map((one) => {
    const { tone, meaning, advice } = verdict(one.verdict);
    return row(one.verdict, VERDICT, badge(one.verdict, tone), count(one.turns), compact(one.computed_tokens),
      [meaning, advice ? el("div", { class: "quiet small" }, advice) : null]);
  });
  return [table(`${plural(recent.turns, "turn")} of the last ${span(recent.span_s)}, as under Reuse`, VERDICT, rows)];
}

const CONVERSATION = [["Conversation", "name"], ["Turns", "number"], ["Latest turn"], ["Its prompt", "bars"], ["Tokens held", "number"], ["Seen", "number"]];

/** The list of conversations, the open one with its turns. `view` is what the page keeps of it. */
export function conversations(answer, view) {
  const all = answer.conversations;
  if (!all.length) return [el("p", {}, "No conversation is known yet."), firstTurn()];
  const wanted = view.filter.trim().toLowerCase();
  const shown = all.filter((one) => !wanted || haystack(one).includes(wanted));
  const several = new Set(all.map((one) => one.tenant)).size > 1;
  const known = answer.total > all.length ? `the latest ${count(all.length)} of ${count(answer.total)}` : plural(all.length, "conversation");
  const whose = answer.all_tenants ? "" : " of your tenant";
  const rows = shown.map((one) => conversationRow(one, several, view)).flat();
  if (view.open && !shown.some((one) => keyOf(one) === view.open.key)) rows.unshift(detailRow(view));
  return [
    rows.length ? table(`${known}${whose}${wanted ? `, ${count(shown.length)} that match` : ""}; choose one to see its turns`, CONVERSATION, rows) : null,
    shown.length ? null : lookUp(view.filter.trim(), all, several),
  ];
}

export const keyOf = (one) => JSON.stringify([one.tenant, one.model, one.conversation_id]);

function haystack(one) {
  const turn = one.latest_turn;
  return [one.conversation_id, one.model, one.tenant, one.engine_id, turn?.verdict, turn?.plan, turn?.decode_engine].join("\n").toLowerCase();
}

function lookUp(filter, all, several) {
  const models = [...new Map(all.map((one) => [JSON.stringify([one.tenant, one.model]), one])).values()].slice(0, 5);
  return el("div", { "data-key": "look up" }, quiet("Nothing in this list matches. It may be an earlier one; look it up by its whole id:"),
    models.map((one) => {
      const key = keyOf({ ...one, conversation_id: filter });
      return el("button", { type: "button", class: "open", id: `open ${key}`, "data-open": key },
        id(filter), ` of ${one.model}`, several ? ` (${one.tenant || "no tenant"})` : "");
    }));
}

function conversationRow(one, several, view) {
  const key = keyOf(one);
  const opened = view.open?.key === key;
  const turn = one.latest_turn;
  const listed = row(key, CONVERSATION,
    [el("button", { type: "button", class: "open", id: `open ${key}`, "data-open": key, "aria-expanded": String(opened) }, id(one.conversation_id)),
      el("div", { class: "quiet small" }, id(one.model), several ? [" · tenant ", id(one.tenant || "none")] : null)],
    [count(one.turns), one.turns_in_flight ? el("div", { class: "small" }, `${count(one.turns_in_flight)} in flight`) : null],
    turn ? badge(turn.verdict, verdict(turn.verdict).tone) : el("span", { class: "quiet" }, "not reported"),
    turn ? tokens(turn, turn.prompt_tokens) : "–",
    one.held_tokens ? [compact(one.held_tokens), el("div", { class: "quiet small" }, id(one.engine_id))] : "–",
    one.quiet_s === null ? "–" : ago(one.quiet_s));
  return opened ? [listed, detailRow(view)] : [listed];
}

/** A turn's prompt as a bar; `scale` is as many tokens as the whole width. */
function tokens(turn, scale) {
  const computed = Math.max(0, turn.prompt_tokens - turn.reused_tokens - turn.local_tokens);
  if (!turn.prompt_tokens) return quiet("tokens not known");
  const parts = [["reused", turn.reused_tokens], ["local", turn.local_tokens], ["computed", computed]];
  const label = `${count(turn.prompt_tokens)} prompt tokens: ${parts.map(([name, size]) => `${count(size)} ${name}`).join(", ")}`;
  return el("div", { title: label }, bar(parts, scale, label, "scaled"), legend(parts.filter(([, size]) => size)));
}

function detailRow(view) {
  return el("tr", { class: "detail", role: "row", "data-key": "detail" },
    el("td", { role: "cell", colspan: CONVERSATION.length }, detail(view)));
}

function detail({ open, traceUrl }) {
  const [, model, name] = JSON.parse(open.key);
  const title = el("h3", {}, "Turns of ", id(name), ` (${model})`);
  const close = el("button", { type: "button", id: "close", "data-open": open.key }, "Close");
  const head = el("div", { class: "titled" }, title, close);
  if (open.problem) return el("div", { class: "conversation" }, head, el("p", { class: "notice bad" }, open.problem));
  if (!open.answer) return el("div", { class: "conversation" }, head, quiet("Loading …"));
  const turns = open.answer.turns;
  const scale = Math.max(...turns.map((turn) => turn.prompt_tokens), 1);
  const branches = new Set(turns.map((turn) => turn.conversation_id)).size > 1;
  return el("div", { class: "conversation" }, head, held(open.answer.held),
    turns.length
      ? el("ol", { class: "turns", reversed: true }, [...turns].reverse().map((turn) => turnItem(turn, scale, branches, traceUrl)))
      : quiet("None of its turns was reported."));
}

function held(list) {
  if (!list.length) return quiet("No engine holds anything of it now.");
  const words = list.map((one) => [`${count(one.token_count)} tokens are held on `, id(one.engine_id),
    one.being_read ? ", being read now" : one.kept_s === null ? "" : `, for ${span(one.kept_s)} more unless it shows life`]);
  return el("p", {}, words.map((word, place) => [place ? "; " : "", word]), ".");
}

function turnItem(turn, scale, branches, traceUrl) {
  const { tone, meaning } = verdict(turn.verdict);
  const times = [["First token", turn.first_byte_ms], ["Saved", turn.saved_ms], ["Prefill", turn.prefill_ms], ["Read", turn.read_ms], ["Whole", turn.total_ms]];
  const old = turn.age_ms ?? null;
  return el("li", { class: "turn", "data-key": `${turn.conversation_id} ${turn.turn}` },
    el("div", {}, el("strong", {}, `Turn ${turn.turn}`), old === null ? null : el("div", { class: "quiet small" }, ago(old / 1000)),
      branches ? el("div", { class: "quiet small" }, id(turn.conversation_id)) : null),
    el("div", {}, tokens(turn, scale)),
    el("div", {}, badge(turn.verdict, tone), el("div", { class: "small" }, meaning),
      el("div", { class: "quiet small" }, plan(turn), expected(turn) ? ` (expected: ${expected(turn)})` : ""),
      el("div", { class: "quiet small" }, route(turn), trace(turn, traceUrl))),
    el("dl", {}, times.filter(([, time]) => time).map(([name, time]) => [el("dt", {}, name), el("dd", {}, milliseconds(time))])));
}

function route(turn) {
  const engines = [turn.prefill_engine, turn.decode_engine].filter(Boolean);
  return engines.map((engine, place) => [place ? " → " : "", id(engine.replace(/^https?:\/\//, ""))]);
}

function trace(turn, traceUrl) {
  if (!/^https?:/.test(traceUrl) || !/^[0-9a-f]{32}$/.test(turn.trace_id ?? "")) return null;
  const address = traceUrl.replace("{trace_id}", turn.trace_id);
  return [" · ", el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, `trace ${turn.trace_id.slice(0, 8)}`)];
}
