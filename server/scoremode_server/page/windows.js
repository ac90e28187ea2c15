// A text that is longer than the context, scored in the windows that `ppl-client` cuts by default: method `sliding` of
// client/scoremode/windows.py.

const LONGEST_CONTEXT = 2048;

const REQUESTS_AT_ONCE = 4;
/* At each server. A browser has six connections to a server, and the page may ask for something else meanwhile. */

/**
 * Windows `[start, end)` of a text's tokens. The positions from `first` on, counted within a window, are those that no
 * earlier window has reached; the first window's are all of its own, its first token without context among them.
 */
export function slidingWindows(numTokens, maxModelLen) {
  const context = Math.min(LONGEST_CONTEXT, maxModelLen);
  const stride = Math.max(1, Math.floor(context / 4));
  const list = [];
  for (let start = 0, reached = 0; reached < numTokens; start += stride) {
    const end = Math.min(start + context, numTokens);
    list.push({ start, end, first: reached - start });
    reached = end;
  }
  return { context, stride, list };
}

/** Score `tokens` in windows; `options` are fields of `/v1/score`. The answer is as for a text in one sequence. */
export async function scoreInWindows(server, tokens, windows, options, signal, onWindow) {
  const answers = [];
  const failed = new AbortController();
  const ended = AbortSignal.any([signal, failed.signal]);
  // One iterator for all: each takes the next window that none has taken.
  const remaining = windows.list.entries();
  const scoreSome = async () => {
    for (const [index, { start, end, first }] of remaining) {
      const body = { ...options, prompt: [tokens.slice(start, end)], logprobs_from: first };
      answers[index] = server.scoresOfTokens(await server.score(body, ended));
      onWindow();
    }
  };
  try {
    await Promise.all(Array.from({ length: REQUESTS_AT_ONCE }, scoreSome));
  } finally {
    failed.abort();
  }
  return { ...answers[0], data: [joined(answers.map((answer) => answer.data[0]))] };
}

function joined(results) {
  const names = ["token_ids", "logprobs", "tokens", "ranks", "top_logprobs"].filter((name) => results[0][name]);
  const sum = (name) => results.reduce((total, result) => total + result[name], 0);
  return {
    ...Object.fromEntries(names.map((name) => [name, results.flatMap((result) => result[name])])),
    sum_logprob: sum("sum_logprob"),
    num_scored: sum("num_scored"),
  };
}
