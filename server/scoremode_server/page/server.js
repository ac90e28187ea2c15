// Requests to a server of Scoremode, and what can go wrong with them.

export const LOWEST_LOGPROB = -9999;
/* JSON has this instead of minus infinity. */

/** Says to the page's user why there is no answer; `status` is that of a server's refusal. */
export class ShownError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

/** A server: what it is called here, the URL below which its routes are, and its API key or "". */
export class Server {
  constructor(name, base, key) {
    this.name = name;
    this.base = base;
    this.key = key;
  }

  /** What is served (`GET /v1/score`). */
  async info(signal) {
    const isRight = (info) => [info.max_model_len, info.max_top_logprobs].every(Number.isFinite);
    return this.#read(await this.#ask({ signal }), isRight);
  }

  /** The token ids of a text. */
  async tokenize(prompt, signal) {
    const text = await this.#ask({ method: "POST", body: JSON.stringify({ prompt }), signal }, "tokenize");
    return this.#read(text, ({ tokens }) => Array.isArray(tokens)).tokens;
  }

  /** The answer to `POST /v1/score`, as JSON that is not parsed yet. */
  score(body, signal) {
    return this.#ask({ method: "POST", body: JSON.stringify(body), signal });
  }

  /**
   * The answer to `POST /v1/score` for one text with its tokens and their ranks, parsed.
   *
   * Throws a ShownError if it is anything else, as that of another kind of server or of a proxy.
   */
  scoresOfTokens(answer) {
    const isRight = ({ data }) => data.length === 1 && data[0].tokens && data[0].ranks && isResult(data[0]);
    return withInfinities(this.#read(answer, isRight));
  }

  /** The same for continuations, of which there are `count`. */
  scoresOfContinuations(answer, count) {
    return withInfinities(this.#read(answer, ({ data }) => data.length === count && data.every(isResult)));
  }

  #read(text, isRight) {
    try {
      const answer = JSON.parse(text);
      if (isRight(answer)) return answer;
    } catch {
      // It is not JSON, or does not have the expected fields.
    }
    throw new ShownError(`${this.name} did not answer like Scoremode.`);
  }

  async #ask(options, path = "v1/score") {
    const headers = { "Content-Type": "application/json" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    let response, text;
    try {
      response = await fetch(new URL(path, this.base), { ...options, headers, credentials: "omit" });
      text = await response.text();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ShownError(this.#unreachable());
    }
    if (!response.ok) throw new ShownError(this.#refusal(response, text), response.status);
    return text;
  }

  /** Why there is no answer; the server's own words where the page has none. */
  #refusal(response, text) {
    const known = {
      401: this.key ? "does not accept the API key." : "needs an API key: type it in above.",
      404: "has no Scoremode at this address.",
      429: "is busy. Try again in a moment.",
      502: "is not ready. Try again in a moment.",
      503: "is not ready. Try again in a moment.",
      504: "took too long. Try again, or a shorter text.",
    }[response.status];
    return known ? `${this.name} ${known}` : `${this.name}: ${reason(response, text)}`;
  }

  #unreachable() {
    const isElsewhere = new URL(this.base).origin !== location.origin;
    const origins = `--allowed-origins '["${location.origin}"]'`;
    const allowed = isElsewhere ? ` If it runs, it may have to be started with ${origins}.` : "";
    return `${this.name} cannot be reached.${allowed}`;
  }
}

/** Whether this is a result of `/v1/score`, and all that it says of tokens it says of each. */
function isResult({ token_ids, logprobs, sum_logprob, num_scored, tokens, ranks, top_logprobs }) {
  const perToken = [logprobs, tokens, ranks, top_logprobs].filter((each) => each !== undefined);
  const isOfEach = perToken.every((each) => Array.isArray(each) && each.length === token_ids.length);
  return isOfEach && Array.isArray(logprobs) && Number.isFinite(sum_logprob) && Number.isInteger(num_scored);
}

/** An answer in which logprobs, and so their sums, are minus infinity where JSON could not say so. */
function withInfinities(answer) {
  const infinite = (logprob) => (logprob !== null && logprob <= LOWEST_LOGPROB ? -Infinity : logprob);
  for (const result of answer.data) {
    result.logprobs = result.logprobs.map(infinite);
    if (result.logprobs.includes(-Infinity)) result.sum_logprob = -Infinity;
    for (const each of (result.top_logprobs ?? []).flat()) {
      if (each) each.logprob = infinite(each.logprob);
    }
  }
  return answer;
}

/** What a server says is wrong, in OpenAI's shape, with the page's names of things; a proxy may answer in another. */
function reason(response, text) {
  let message;
  try {
    ({ message } = JSON.parse(text).error);
  } catch {
    return `answered with status ${response.status} ${response.statusText}`;
  }
  return String(message)
    .replace(/continuations\[(\d+)\]( after prompt\[0\])?/g, (_, index) => `continuation ${Number(index) + 1}`)
    .replace(/prompt(\[0\])?/g, "the text")
    .replace(/top_logprobs/g, "Alternatives");
}

/**
 * The URL of a server as it was typed in, so that relative paths lead below it.
 *
 * Throws a ShownError if it is none.
 */
export function serverUrl(typed) {
  const url = URL.canParse(typed) ? new URL(typed) : null;
  if (!["http:", "https:"].includes(url?.protocol)) {
    throw new ShownError(`The second server: ${typed} is not a URL that begins with http:// or https://.`);
  }
  return `${url.origin}${url.pathname.replace(/\/*$/, "/")}`;
}
