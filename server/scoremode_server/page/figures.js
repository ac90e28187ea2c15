// Figures of a scored text, with the formulas of `ppl-client` (client/scoremode/metrics.py), and how they are written.

const encoder = new TextEncoder();

/** Bytes of a text in UTF-8. */
export function countBytes(text) {
  return encoder.encode(text).length;
}

/** Figures of a result of `/v1/score`: logprobs in nats; null where nothing was scored, and bits of no byte. */
export function textFigures(result, text) {
  const bytes = countBytes(text);
  // Not `-sum`, which is −0 where the sum is 0.
  const [nll, scored] = [0 - result.sum_logprob, result.num_scored];
  return {
    scored,
    tokens: result.token_ids.length,
    sumLogprob: result.sum_logprob,
    perplexity: scored ? Math.exp(nll / scored) : null,
    bitsPerByte: scored && bytes ? nll / (Math.LN2 * bytes) : null,
  };
}

/** Figures of a continuation: the sum of its logprobs, and that sum by token and by byte of `text`, in nats. */
export function continuationFigures(result, text) {
  return {
    sumLogprob: result.sum_logprob,
    perToken: result.sum_logprob / result.num_scored,
    perByte: result.sum_logprob / countBytes(text),
    tokens: result.num_scored,
    isGreedy: result.is_greedy,
  };
}

/** How much likelier a token is on a second server, in nats. Where it is impossible on both there is no difference. */
export function differenceOf(logprob, second) {
  return logprob === second ? 0 : second - logprob;
}

export function formatProbability(logprob) {
  const percent = 100 * Math.exp(logprob);
  if (percent !== 0 && percent < 0.01) return `${percent.toExponential(1).replace("-", "−")} %`;
  return `${percent.toFixed(2)} %`;
}

/** A figure with some four digits; an en dash where there is none. */
export function formatNumber(value, digits = 3) {
  if (value === null) return "–";
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : "∞";
  const text = value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return text.replace("-", "−");
}

export function formatCount(count) {
  return count.toLocaleString("en");
}
