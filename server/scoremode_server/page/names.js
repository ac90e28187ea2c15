// Names of models, short enough for a table.

const LONGEST = 28;

/** The last part of each path, and more of it where two would be the same; long ones without their middle. */
export function shortNames(models) {
  const parts = models.map((model) => model.split("/").filter(Boolean));
  const named = (count) => parts.map((each) => shortened(each.slice(-count).join("/")));
  const longest = Math.max(...parts.map((each) => each.length));
  for (let count = 1; count <= longest; count++) {
    const names = named(count);
    if (new Set(names).size === names.length) return names;
  }
  return named(1).map((name, at) => (at ? `${name} (second server)` : name));
}

function shortened(name) {
  return name.length > LONGEST ? `${name.slice(0, LONGEST / 2)}…${name.slice(1 - LONGEST / 2)}` : name;
}
