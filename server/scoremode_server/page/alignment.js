// Which part of a text each of its tokens is.
//
// The server sends each token's text alone. The bytes of a part of a character are "\uFFFD" there: a token may end
// within a character, and the next one resume inside it. What those bytes are, the text itself says.

const INCOMPLETE = "\uFFFD";

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/**
 * For each token, in order, the part of `text` that it completes: together they are the text. A token that
 * `endsWithin` a character completes what is before that, which may be nothing. A special token at either end that is
 * no part of the text keeps its own name, and is not `inText`.
 *
 * Where the tokens do not spell the text, because the tokenizer changes it, their own texts are returned.
 */
export function align(text, tokens) {
  const bytes = encoder.encode(text);
  const bounds = boundaries(bytes, tokens);
  return tokens.map((token, index) => {
    const [start, end] = bounds ? bounds.slice(index, index + 2) : [0, 0];
    if (start === end) {
      return { text: token, inText: !bounds, endsWithin: false };
    }
    const part = bytes.subarray(characterStart(bytes, start), characterStart(bytes, end));
    return { text: decoder.decode(part), inText: true, endsWithin: isWithinCharacter(bytes, end) };
  });
}

/** Where each token begins in `bytes`, and where the last one ends; null if they do not spell them. */
function boundaries(bytes, tokens) {
  // A token that ends within a character may end at several places until the next one is known.
  const steps = [];
  let starts = [0];
  for (const [index, token] of tokens.entries()) {
    const isOuter = index === 0 || index === tokens.length - 1;
    const startOf = new Map();
    for (const start of starts) {
      const found = ends(bytes, start, token);
      // SentencePiece puts a space before a text.
      if (start === 0 && token.startsWith(" ")) found.push(...ends(bytes, start, token.slice(1)));
      if (isOuter) found.push(start);
      for (const end of found) {
        if (!startOf.has(end)) startOf.set(end, start);
      }
    }
    steps.push(startOf);
    starts = [...startOf.keys()];
  }
  if (!starts.includes(bytes.length)) {
    return null;
  }
  const bounds = [bytes.length];
  for (const startOf of steps.reverse()) {
    bounds.push(startOf.get(bounds.at(-1)));
  }
  return bounds.reverse();
}

/** Where a token that begins at `start` may end. */
function ends(bytes, start, token) {
  let position = start;
  const parts = partsOf(token);
  for (const [index, part] of parts.entries()) {
    if (part.isIncomplete && isWithinCharacter(bytes, position)) {
      // Bytes that continue a character are shown one by one.
      position += 1;
    } else if (part.isIncomplete && index === parts.length - 1) {
      // The bytes that begin a character are shown as one, and the text may have this very character.
      const whole = matches(bytes, position, part.bytes) ? [position + part.bytes.length] : [];
      return [...within(bytes, position), ...whole];
    } else if (matches(bytes, position, part.bytes)) {
      position += part.bytes.length;
    } else {
      return [];
    }
  }
  return [position];
}

/** A token's text, cut where it is incomplete. */
function partsOf(token) {
  const texts = token.includes(INCOMPLETE) ? token.split(/(\uFFFD)/).filter(Boolean) : [token];
  return texts.map((text) => ({ bytes: encoder.encode(text), isIncomplete: text === INCOMPLETE }));
}

/** Places within the character that begins at `position`. */
function within(bytes, position) {
  const places = [];
  while (isWithinCharacter(bytes, ++position)) {
    places.push(position);
  }
  return places;
}

function matches(bytes, position, expected) {
  for (let offset = 0; offset < expected.length; offset++) {
    if (bytes[position + offset] !== expected[offset]) return false;
  }
  return true;
}

function isWithinCharacter(bytes, position) {
  return (bytes[position] & 0xc0) === 0x80;
}

/** Where the character begins that `position` is within; `position` itself between characters. */
function characterStart(bytes, position) {
  while (isWithinCharacter(bytes, position)) {
    position -= 1;
  }
  return position;
}
