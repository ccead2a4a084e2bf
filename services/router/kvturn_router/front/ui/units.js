// Numbers as people read them.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => whole.format(Math.round(number));
export const compact = (number) => (number < 10_000 ? count(number) : short.format(number));
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");

export function milliseconds(time) {
  if (time >= 10_000) return `${(time / 1000).toFixed(1)} s`;
  if (time >= 1000) return `${(time / 1000).toFixed(2)} s`;
  return time >= 10 ? `${Math.round(time)} ms` : `${time.toFixed(1)} ms`;
}

export function span(seconds) {
  for (const [unit, length] of [["d", 86_400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

export const ago = (seconds) => (seconds < 1 ? "now" : `${span(seconds)} ago`);
