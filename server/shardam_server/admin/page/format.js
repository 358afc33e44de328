// How numbers are written. Values of the API may be the strings NaN, Infinity and -Infinity.

const UNKNOWN = "–";
const COUNT = new Intl.NumberFormat("en-US");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A count with separators; – if it is not known. */
export function count(value) {
  return value === null || value === undefined ? UNKNOWN : COUNT.format(value);
}

/** A size in binary units. */
export function bytes(value) {
  if (value === null || value === undefined) {
    return UNKNOWN;
  }
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(size < 10 ? 2 : 1)} ${UNITS[unit]}`;
}

/** A duration in its two largest units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) {
    return UNKNOWN;
  }
  const whole = Math.floor(seconds);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  const shown = first < 0 ? parts.slice(3) : parts.slice(first, first + 2);
  return shown.map(([amount, unit]) => `${amount} ${unit}`).join(" ");
}

/** A value exactly as the API sent it: the shortest digits that read back to the same float32. */
export function exact(value) {
  return String(value);
}

/** A value with four digits, for tables. */
export function short(value) {
  return typeof value === "string" ? value : String(Number(value.toPrecision(4)));
}

/** An initializer as one would write it. */
export function initializer(init) {
  const { kind, ...values } = init;
  const inner = Object.entries(values).map(([name, value]) => `${name}=${value}`);
  return `${kind}(${inner.join(", ")})`;
}
