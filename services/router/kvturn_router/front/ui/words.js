// What the router's words mean, and what to do about them: docs/turns.md, in short.

/** For each verdict: how it is shown, what it means, and what helps where something does. */
export const VERDICTS = {
  reused: ["good", "Prefill read the KV that decode held, and computed the rest."],
  partial_prefix: ["good", "The history was edited, cut or compacted: prefill read what is still equal at its start.",
    "Nothing, if the client means to change its history. Else have it send earlier messages back unchanged."],
  local: ["good", "The decode engine that holds the KV computed the short rest itself, without prefill."],
  first_turn: ["", "The conversation was not known before: there is nothing to reuse yet.",
    "Nothing. If later turns show this too, name the conversation: X-Conversation-Id."],
  no_lease: ["warn", "The conversation is known, but no engine holds anything of it, or it may not be read yet.",
    "Seen for some seconds after a change of lease service. If it stays, run decode with the connector and bidirectional_kv_xfer."],
  ended: ["", "The client ended the conversation.", "Nothing, unless clients end conversations that they go on with."],
  released: ["warn", "What was held was given up: idle for too long, memory needed, a newer turn, or revoked.",
    "Give decode more KV memory, raise the lease service's idle time, or have clients send heartbeats while they are away."],
  expired: ["warn", "What was held reached its longest hold.", "Raise decoder_kv_blocks_ttl of decode."],
  consumed: ["warn", "Another turn has read what was held; each retention is read once.",
    "Do not send two turns of one conversation from the same state; name parallel branches apart."],
  read_in_progress: ["warn", "Another turn is reading what is held.",
    "Have the client wait for its answer before it sends the next turn."],
  read_failed: ["bad", "The transfer between the engines failed; the prompt was computed.",
    "Look at NIXL in the engines' logs: side channel addresses, backend, network."],
  read_too_long: ["bad", "The transfer took longer than a read may; what it brought was thrown away.",
    "Look for a slow path between the engines (TCP where RDMA was meant), or raise --longest-read of the lease service."],
  prefix_mismatch: ["warn", "The prompt begins with other tokens than what is held.",
    "Keep system prompt, tools and chat template the same from turn to turn; no clock or counter at the start of the prompt."],
  below_threshold: ["", "So little could be read that computing it is faster.", "Nothing: short conversations show it."],
  cheaper_to_compute: ["", "Computing was expected to be faster than reading.",
    "Nothing, unless --plan recompute is set. On fast links check that reads are not slow."],
  unsupported_model: ["warn", "The model's KV is not plain full attention, or the engines' block sizes differ.",
    "Give all engines the same --block-size. Other kinds of models are served without reuse."],
  engine_lost: ["bad", "The decode engine that held the KV is gone, or has not registered again yet.",
    "Look at Engines above and at the engine's log. On busy machines raise --session-ttl of the lease service."],
  lease_service_unreachable: ["bad", "The lease service did not answer in time.",
    "Look whether it runs and is reached from here (--lease); on slow networks raise --question-deadline-ms."],
  store_unavailable: ["bad", "No lease service can lead, because etcd does not answer.", "Bring etcd back."],
  turned_off: ["", "The client asked for no reuse: X-Kvturn-Reuse: off.", "Nothing."],
  not_offered: ["warn", "Reuse is not set up on this way: no lease service, engines without the connector, or a request for decode alone.",
    "Start the router with --lease, and each engine with the connector."],
};

const PLANS = {
  pull: "Prefill reads from the holder",
  local: "The holder computes the rest alone",
  recompute: "Prefill computes the whole prompt",
  alone: "Decode serves it alone",
};

const REASONS = {
  cheapest: "expected to be the fastest way",
  explored: "tried, to learn how long it takes",
  only_way: "the only way open",
  not_split: "its answer cannot be split between two engines",
  history_at_decode: "its history lies in that engine alone",
};

const STANDINGS = {
  at_holder: "decode is the holder",
  no_holder: "nobody is known to hold its KV",
  holder_lost: "the holder is down",
  holder_draining: "the holder is draining, another engine decodes",
  holder_overloaded: "the holder is full or busy, another engine decodes",
};

/** Returns how a verdict is shown: tone, meaning, advice. */
export function verdict(word) {
  const [tone, meaning, advice = ""] = VERDICTS[word] ?? ["", "A verdict that this page does not know."];
  return { tone, meaning, advice };
}

/** Returns a turn's plan and the reason for it, in plain words. */
export function plan(turn) {
  const [decisive = "", standing = ""] = turn.plan_reason.split(" ");
  const way = PLANS[turn.plan] ?? turn.plan;
  const why = REASONS[decisive] ?? (decisive in VERDICTS ? "nothing can be read" : decisive);
  return [way && why ? `${way}: ${why}` : way || why, STANDINGS[standing] ?? standing].filter(Boolean).join("; ");
}

/** Returns what each way was expected to take, "" where the reason has no numbers. */
export function expected(turn) {
  const numbers = [...turn.plan_reason.matchAll(/\b(pull|local|recompute)_ms=(\d+(?:\.\d+)?)/g)];
  return numbers.map(([, way, time]) => `${way} ${Math.round(Number(time))} ms`).join(", ");
}
