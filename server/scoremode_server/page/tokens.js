// The scored text: its tokens in their colors, which one is chosen, and how to go from one to the next.

import { differenceColor, rankColor, surpriseColor } from "./colors.js";
import { element } from "./dom.js";

const DRAWN_AT_ONCE = 2000;
/* Tokens that are drawn before the browser may do something else. */

const LINES_TOGETHER = 40;
/* Tokens from which on a line's end begins a new block, which the browser skips while it is out of sight. */

/**
 * Tokens in a container. What a token is shown as is `pieces` (see alignment.js), its figures are those of `results`,
 * one or two results of `/v1/score` with the same tokens.
 *
 * @param onChoice is called with the index of a token that is pointed at or focused, and its element; with null when
 *   there is none any more.
 */
export class TokenView {
  #spans = [];
  #pieces = [];
  #results = [];
  #tabStop = 0;
  #chosen = null;
  #drawing = null;

  constructor(container, onChoice) {
    this.container = container;
    this.onChoice = onChoice;
    // Unlike "pointerover", this is not sent when it is the text that moves, below a pointer that is at rest.
    container.addEventListener("pointermove", (event) => this.#choose(indexOf(event.target)));
    container.addEventListener("pointerleave", () => this.#choose(indexOf(document.activeElement)));
    container.addEventListener("click", (event) => this.#focus(indexOf(event.target)));
    container.addEventListener("focusin", (event) => this.#choose(indexOf(event.target)));
    container.addEventListener("focusout", () => this.#choose(null));
    container.addEventListener("keydown", (event) => this.#press(event));
  }

  /** Draw tokens, the first of them at once and the others as the browser has time. */
  draw(pieces, results, mode) {
    this.#choose(null);
    const hadFocus = this.container.contains(document.activeElement);
    [this.#pieces, this.#results] = [pieces, results];
    [this.#spans, this.#tabStop] = [[], 0];
    this.container.replaceChildren();
    this.container.scrollTop = 0;
    const rest = this.#drawInParts(mode);
    this.#drawing = rest;
    rest.next();
    continueLater(rest, () => this.#drawing === rest);
    this.#spans[0]?.setAttribute("tabindex", "0");
    // The element that had it is gone, and with it the keyboard's place in the page.
    if (hadFocus) this.#spans[0]?.focus({ preventScroll: true });
  }

  /** Color the tokens anew: by "surprise", "rank", or the "difference" of two results. */
  paint(results, mode) {
    this.#results = results;
    this.mode = mode;
    for (let index = 0; index < this.#spans.length; index++) this.#paintToken(index);
  }

  *#drawInParts(mode) {
    this.mode = mode;
    let block = null;
    for (let first = 0; first < this.#pieces.length; first += DRAWN_AT_ONCE) {
      const last = Math.min(first + DRAWN_AT_ONCE, this.#pieces.length);
      const blocks = document.createDocumentFragment();
      for (let index = first; index < last; index++) {
        if (!block) {
          block = element("div", { class: "lines", dir: "auto", role: "presentation" });
          blocks.append(block);
        }
        const span = this.#makeToken(index);
        block.append(span);
        this.#spans.push(span);
        this.#paintToken(index);
        // Without a newline before it a block would begin a line where the text has none.
        if (this.#pieces[index].text.endsWith("\n") && block.childElementCount >= LINES_TOGETHER) block = null;
      }
      this.container.append(blocks);
      yield;
    }
  }

  #makeToken(index) {
    const { text, inText } = this.#pieces[index];
    const span = element("span", { "data-index": index, role: "option" }, text);
    if (!inText) span.classList.add("special");
    if (text.startsWith("\n")) span.classList.add("newline");
    if (this.#results[0].logprobs[index] === null) span.classList.add("unscored");
    if (!text.trim()) span.setAttribute("aria-label", text ? "white space" : "part of a character");
    return span;
  }

  #paintToken(index) {
    const colors = this.tokensOfCharacter(index).map((each) => this.#color(each));
    const style = this.#spans[index].style;
    if (colors.length === 1) {
      style.background = colors[0];
      return;
    }
    // A character of several tokens has a stripe for each, the first on top.
    const stripes = colors.map((color, at) => {
      return `${color} ${(100 * at) / colors.length}% ${(100 * (at + 1)) / colors.length}%`;
    });
    style.background = `linear-gradient(${stripes.join(", ")})`;
  }

  #color(index) {
    const [first, second] = this.#results;
    const logprob = first.logprobs[index];
    if (logprob === null) return "transparent";
    if (this.mode === "rank") return rankColor(first.ranks[index]);
    if (this.mode === "difference") return differenceColor(logprob, second.logprobs[index]);
    return surpriseColor(logprob);
  }

  /** Indices of a token and of those before it that begin the character which it completes. */
  tokensOfCharacter(index) {
    if (!this.#pieces[index].text) return [index];
    let first = index;
    while (this.#pieces[first - 1]?.endsWithin) first -= 1;
    return Array.from({ length: index - first + 1 }, (_, offset) => first + offset);
  }

  /** The element of the chosen token, or null. */
  get chosenElement() {
    return this.#chosen === null ? null : this.#spans[this.#chosen];
  }

  #choose(index) {
    if (index === this.#chosen) return;
    this.#mark(false);
    this.#chosen = index;
    this.#mark(true);
    this.onChoice(index);
  }

  #mark(isChosen) {
    const span = this.chosenElement;
    span?.classList.toggle("chosen", isChosen);
    span?.setAttribute("aria-selected", String(isChosen));
    span?.toggleAttribute("aria-describedby", false);
    if (isChosen) span?.setAttribute("aria-describedby", "card");
  }

  #focus(index) {
    if (index === null || index < 0 || index >= this.#spans.length) return;
    this.#spans[this.#tabStop].removeAttribute("tabindex");
    this.#tabStop = index;
    this.#spans[index].setAttribute("tabindex", "0");
    this.#spans[index].focus();
  }

  #press(event) {
    const index = indexOf(event.target);
    if (index === null || event.ctrlKey || event.altKey || event.metaKey) return;
    const rightToLeft = getComputedStyle(this.#spans[index].parentElement).direction === "rtl";
    const moves = {
      ArrowRight: () => index + (rightToLeft ? -1 : 1),
      ArrowLeft: () => index + (rightToLeft ? 1 : -1),
      ArrowDown: () => this.#onNextLine(index, 1),
      ArrowUp: () => this.#onNextLine(index, -1),
      Home: () => 0,
      End: () => this.#spans.length - 1,
    };
    if (event.key === "Escape") this.#choose(null);
    if (!moves[event.key]) return;
    event.preventDefault();
    this.#focus(moves[event.key]());
  }

  /** The token of the line above (-1) or below (1) that is nearest to where a token stands. */
  #onNextLine(index, step) {
    const from = this.#spans[index].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let [best, distance, line] = [index, Infinity, null];
    for (let at = index + step; at >= 0 && at < this.#spans.length; at += step) {
      const rectangle = this.#spans[at].getClientRects()[0];
      if (Math.abs(rectangle.top - from.top) < rectangle.height / 2) continue;
      line ??= rectangle.top;
      if (Math.abs(rectangle.top - line) >= rectangle.height / 2) break;
      const away = Math.abs(rectangle.left + rectangle.width / 2 - middle);
      if (away < distance) [best, distance] = [at, away];
    }
    return best;
  }
}

/** Take the steps of a generator one by one, as long as it is still wanted. */
function continueLater(steps, isWanted) {
  setTimeout(() => {
    if (isWanted() && !steps.next().done) continueLater(steps, isWanted);
  });
}

/** The index of the token that an element is in, or null. */
function indexOf(target) {
  const span = target?.closest?.("#tokens [data-index]");
  return span ? Number(span.dataset.index) : null;
}
