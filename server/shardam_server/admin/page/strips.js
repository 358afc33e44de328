// A row's values as a strip of bars with the numbers under it.

import { make, setText } from "./dom.js";
import { exact, short } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const MAX_BARS = 512; // more are thinner than a pixel: neighbours then share the larger one's bar
const MAX_NUMBERS = 1024; // longer lists make the page slow; the API has them all
const OPEN_UP_TO = 32; // numbers that are shown without a click

/** Bars and numbers of one component of a record. */
export class Strip {
  /** @param {string} name weight, exp_avg, exp_avg_sq or initial_weight */
  constructor(name) {
    this.element = make("div", `strip ${name}`);
    this.summary = make("span");
    const title = make("h4", "", name);
    title.append(this.summary);
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.name = name;
    this.details = document.createElement("details");
    this.caption = make("summary");
    this.list = document.createElement("ol");
    this.details.append(this.caption, this.list);
    this.element.append(title, this.svg, this.details);
    this.shown = null;
  }

  /** Shows values; the same values again change nothing. */
  update(values) {
    const text = JSON.stringify(values);
    if (text === this.shown) {
      return;
    }
    if (this.shown === null) {
      this.details.open = values.length <= OPEN_UP_TO;
    }
    this.shown = text;
    const description = describe(values);
    setText(this.summary, description);
    this.svg.setAttribute("aria-label", `${this.name}: ${description}`);
    this.draw(values);
    this.list.replaceChildren(...values.slice(0, MAX_NUMBERS).map(numberItem));
    const more = values.length > MAX_NUMBERS ? `, the first ${MAX_NUMBERS} shown` : "";
    setText(this.caption, `${values.length} value${values.length === 1 ? "" : "s"}${more}`);
  }

  draw(values) {
    const bars = shrink(values);
    const finite = bars.filter((value) => typeof value === "number");
    const scale = finite.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    const signed = finite.some((value) => value < 0);
    const zero = signed ? 50 : 100;
    this.svg.setAttribute("viewBox", `0 0 ${bars.length} 100`);
    const axis = document.createElementNS(SVG, "line");
    setAttributes(axis, { class: "axis", x1: 0, x2: bars.length, y1: zero, y2: zero });
    const shapes = bars.map((value, index) => {
      const rect = document.createElementNS(SVG, "rect");
      const known = typeof value === "number";
      const height = known ? (Math.abs(value) / scale) * zero * 0.96 : 100;
      const y = known ? (value < 0 ? zero : zero - height) : 0;
      setAttributes(rect, { x: index + 0.1, y, width: 0.8, height, class: known ? "" : "nonfinite" });
      return rect;
    });
    this.svg.replaceChildren(axis, ...shapes);
  }
}

function shrink(values) {
  if (values.length <= MAX_BARS) {
    return values;
  }
  const size = Math.ceil(values.length / MAX_BARS);
  const bars = [];
  for (let start = 0; start < values.length; start += size) {
    const group = values.slice(start, start + size);
    bars.push(group.find((value) => typeof value === "string") ?? group.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a)));
  }
  return bars;
}

function describe(values) {
  const finite = values.filter((value) => typeof value === "number");
  const others = values.length - finite.length;
  const parts = [];
  if (finite.length > 0) {
    const norm = Math.sqrt(finite.reduce((sum, value) => sum + value * value, 0));
    const low = finite.reduce((a, b) => Math.min(a, b));
    const high = finite.reduce((a, b) => Math.max(a, b));
    parts.push(`min ${short(low)}`, `max ${short(high)}`, `norm ${short(norm)}`);
  }
  if (others > 0) {
    parts.push(`${others} not finite`);
  }
  return parts.join(" · ");
}

function numberItem(value, index) {
  const item = document.createElement("li");
  item.append(make("span", "", String(index)), exact(value));
  return item;
}

function setAttributes(element, attributes) {
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, String(value)));
}
