// Elements, made without HTML: whatever is text stays text.

/** An element with attributes and children, which are elements or texts. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    made.setAttribute(attribute, value);
  }
  made.append(...children);
  return made;
}

/** A row of a table, of headings or of one heading and cells. */
export function row(heading, cells, cellName = "td") {
  const first = element("th", { scope: cellName === "th" ? "col" : "row" }, heading);
  return element("tr", {}, first, ...cells.map((cell) => element(cellName, {}, cell)));
}

/** A text in which white space can be seen. */
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}
