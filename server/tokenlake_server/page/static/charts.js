// Charts over time as SVG: stacked areas or lines, with axes, and a cursor for pointer and arrow keys.

import { clock } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, parent = null) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (parent) parent.append(made);
  return made;
}

/** The least "round" number that is at least `value`: one of some steps times a power of `base`. */
function ceiling(value, base) {
  if (value <= 0) return 1;
  const power = base ** Math.floor(Math.log(value) / Math.log(base));
  const steps = base === 10 ? [1, 1.5, 2, 3, 4, 5, 6, 8, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  return power * steps.find((step) => step * power >= value * 0.9999);
}

export class Chart {
  /**
   * `series`: [{ name, label }], drawn from the bottom up when `stacked`. `text`: formats a value. `base`: 10, or 1024
   * for bytes. `onPoint(index | null)`: the cursor moved.
   */
  constructor(element, series, { stacked, text, base, onPoint }) {
    Object.assign(this, { element, series, stacked, text, base, onPoint });
    this.times = [];
    this.values = [];
    this.at = null;
    this.root = svg("svg", { "aria-hidden": "true", focusable: "false" });
    this.grid = svg("g", { class: "grid" }, this.root);
    this.marks = svg("g", {}, this.root);
    this.paths = series.map((each) => svg("path", { class: `${stacked ? "area" : "line"} ${each.name}` }, this.marks));
    this.cursor = svg("line", { class: "cursor" }, this.root);
    this.none = svg("text", { class: "none" }, this.root);
    element.append(this.root);
    new ResizeObserver(() => this.draw()).observe(element);
    element.addEventListener("pointermove", (event) => this.point(this.indexAt(event)));
    element.addEventListener("pointerleave", () => this.point(null));
    element.addEventListener("blur", () => this.point(null));
    element.addEventListener("keydown", (event) => this.key(event));
  }

  /** `times`: ends of the intervals in seconds since 1970. `values`: a list for each series. */
  show(times, values) {
    this.times = times;
    this.values = values;
    if (this.at !== null && this.at >= times.length) this.at = null;
    this.draw();
  }

  point(index) {
    this.at = index;
    this.drawCursor();
    this.onPoint(index);
  }

  key(event) {
    const last = this.times.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12, Home: -1e9, End: 1e9 };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.point(Math.min(last, Math.max(0, (this.at ?? last) + moves[event.key])));
  }

  indexAt(event) {
    if (!this.times.length) return null;
    const place = event.clientX - this.element.getBoundingClientRect().left;
    const time = this.begin + ((place - this.left) / (this.width - this.left - this.right)) * (this.end - this.begin);
    let nearest = 0;
    this.times.forEach((each, at) => {
      if (Math.abs(each - time) < Math.abs(this.times[nearest] - time)) nearest = at;
    });
    return nearest;
  }

  x(time) {
    return this.left + ((time - this.begin) / (this.end - this.begin)) * (this.width - this.left - this.right);
  }

  y(value) {
    return this.height - this.bottom - (value / this.top) * (this.height - this.bottom - this.head);
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.element;
    if (!width || !height) return;
    const unit = parseFloat(getComputedStyle(document.documentElement).fontSize);
    Object.assign(this, { width, height, left: 4.6 * unit, right: 0.7 * unit, bottom: 1.6 * unit, head: 0.7 * unit });
    this.root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const { times, values } = this;
    this.end = times.at(-1) ?? Date.now() / 1000;
    this.begin = Math.min(times[0] ?? this.end, this.end - 120);
    const tops = times.map((_, at) => {
      const here = values.map((each) => each[at]);
      return this.stacked ? here.reduce((sum, each) => sum + each, 0) : Math.max(...here);
    });
    this.top = ceiling(Math.max(0, ...tops), this.base);
    this.drawGrid(unit);
    const below = times.map(() => 0);
    this.paths.forEach((path, number) => {
      const above = times.map((_, at) => values[number][at] + below[at]);
      const edge = times.map((time, at) => `${this.x(time).toFixed(1)} ${this.y(above[at]).toFixed(1)}`);
      let d = edge.length > 1 ? `M${edge.join("L")}` : "";
      if (this.stacked && d) {
        const back = times.map((time, at) => `${this.x(time).toFixed(1)} ${this.y(below[at]).toFixed(1)}`).reverse();
        d += `L${back.join("L")}Z`;
      }
      path.setAttribute("d", d);
      if (this.stacked) above.forEach((value, at) => (below[at] = value));
    });
    this.none.textContent = times.length > 1 ? "" : "the first values come within 10 s";
    this.none.setAttribute("x", width / 2);
    this.none.setAttribute("y", height / 2);
    this.drawCursor();
  }

  drawGrid(unit) {
    this.grid.replaceChildren();
    for (const part of [0, 0.5, 1]) {
      const y = this.y(this.top * part).toFixed(1);
      svg("line", { x1: this.left, x2: this.width - this.right, y1: y, y2: y }, this.grid);
      const label = svg("text", { x: this.left - 0.5 * unit, y, class: "y" }, this.grid);
      label.textContent = this.text(this.top * part);
    }
    const minutes = (this.end - this.begin) / 60;
    const room = (this.width - this.left - this.right) / (5 * unit);
    const step = 60 * ([1, 2, 5, 10, 15, 30, 60].find((each) => minutes / each <= room) ?? 60);
    for (let time = Math.ceil(this.begin / step) * step; time <= this.end; time += step) {
      const x = this.x(time);
      if (x < this.left + 1.4 * unit || x > this.width - this.right - 1.2 * unit) continue;
      const label = svg("text", { x: x.toFixed(1), y: this.height - 0.3 * unit, class: "x" }, this.grid);
      label.textContent = clock(time, false);
    }
  }

  drawCursor() {
    const shown = this.at !== null && this.at < this.times.length;
    this.cursor.classList.toggle("shown", shown);
    if (!shown) return;
    const x = this.x(this.times[this.at]).toFixed(1);
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: this.head, y2: this.height - this.bottom })) {
      this.cursor.setAttribute(name, value);
    }
  }
}
