
// --- What plots and tables do: values on demand, pictures as files, the table of the card to the clipboard ---

function showTip(event) {
  const of = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  const box = byId("tip");
  box.hidden = of === null;
  if (of === null) return;
  box.textContent = of.dataset.tip;
  const at = of.getBoundingClientRect();
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  box.style.left = `${Math.max(4, Math.min(at.left, document.documentElement.clientWidth - width - 4))}px`;
  box.style.top = `${at.top > height + 8 ? at.top - height - 6 : at.bottom + 6}px`;
}

// The plot as a file of its own, in the colors of the page, with what was measured in lines below it.
function svgSource(svg) {
  const copy = svg.cloneNode(true);
  const [, , width, plotHeight] = svg.getAttribute("viewBox").split(" ").map(Number);
  const lines = byId("measured").textContent.match(/\S.{0,89}(?=\s|$)/g);
  const height = plotHeight + 10 * (lines.length + 1);
  const attributes = { width, height, viewBox: `0 0 ${width} ${height}`, "font-family": "sans-serif" };
  for (const [name, value] of Object.entries(attributes)) copy.setAttribute(name, value);
  copy.prepend(svgElement("rect", { width, height, fill: "var(--plot-paper)" }));
  lines.forEach((line, index) => {
    const place = { x: 8, y: plotHeight + 10 * (index + 1), "font-size": 7, fill: "var(--plot-quiet)" };
    copy.append(svgElement("text", place, line));
  });
  const style = getComputedStyle(document.documentElement);
  const source = new XMLSerializer().serializeToString(copy);
  return source.replace(/var\((--plot-[a-z0-9-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
}

function svgElement(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function save(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

function savePng(source, name) {
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = element("canvas");
    [canvas.width, canvas.height] = [3 * image.width, 3 * image.height];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(blob, name));
  });
  image.src = `data:image/svg+xml,${encodeURIComponent(source)}`;
}

function offerFiles(figure) {
  const [asSvg, asPng] = figure.querySelectorAll(".save button");
  const source = () => svgSource(figure.querySelector("svg"));
  asSvg.addEventListener("click", () => save(new Blob([source()], { type: "image/svg+xml" }), `${figure.id}.svg`));
  asPng.addEventListener("click", () => savePng(source(), `${figure.id}.png`));
  figure.querySelector(".save").hidden = false;
}

// A page on disk may not have the clipboard of a page from a server.
async function copyCard(event) {
  event.preventDefault();
  const box = byId("card");
  box.closest("details").open = true;
  box.select();
  const isCopied = navigator.clipboard
    ? await navigator.clipboard.writeText(box.value).then(() => true, () => document.execCommand("copy"))
    : document.execCommand("copy");
  byId("copy").textContent = isCopied ? "Copied" : "Press Ctrl+C";
}

byId("copy").hidden = false;
byId("copy").addEventListener("click", copyCard);
// A browser shows titles late, and none where a screen is touched.
for (const title of document.querySelectorAll("figure title, .panel-of-layers title")) {
  title.parentElement.dataset.tip = title.textContent;
  title.remove();
}
document.querySelectorAll("figure").forEach(offerFiles);
for (const name of ["pointerover", "focusin", "click"]) document.addEventListener(name, showTip);
document.addEventListener("scroll", () => (byId("tip").hidden = true), { passive: true });
