// Draws figures (tlt.watch.chart) as SVG, and completions token by token. Shared by the live page, an export and the
// report. No imports, no network. Invariants: text of a run or a policy becomes a text node or the value of an attribute,
// never markup; the number of nodes is bounded for any number of steps.

const WIDTH = 520, HEIGHT = 260, LEFT = 56, RIGHT = 14, TOP = 24, BOTTOM = 38; // room around the plotting area
const MOST_BARS = 100, MOST_DOTS = 40, MOST_POINTS = 2 * (WIDTH - LEFT - RIGHT);
const SVG = "http://www.w3.org/2000/svg";

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function mark(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// ---- numbers

export function ticks(low, high, about, whole = false) {
  const largest = Math.max(Math.abs(low), Math.abs(high));
  if (high - low <= 1e-9 * largest) [low, high] = largest ? [low - largest / 2, high + largest / 2] : [0, 1]; // always the same
  const rough = (high - low) / about, power = 10 ** Math.floor(Math.log10(rough));
  let size = [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= rough * 0.999);
  if (whole) size = Math.max(1, Math.ceil(size));
  const found = [];
  for (let n = Math.floor(low / size + 1e-9); n <= Math.ceil(high / size - 1e-9); n++) found.push(Number((n * size).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  // powers of ten, and over less than three decades 1-2-5 steps, that enclose the values
  const first = Math.floor(Math.log10(low) + 1e-9), last = Math.ceil(Math.log10(high) - 1e-9), wide = last - first > 3;
  const stride = Math.max(1, Math.ceil((last - first) / 6)), found = [];
  for (let n = first; n <= Math.max(last, first + 1) + (wide ? stride - 1 : 0); n += wide ? stride : 1) {
    for (const part of wide ? [1] : [1, 2, 5]) found.push(Number((part * 10 ** n).toPrecision(3)));
  }
  const start = found.findLastIndex((tick) => tick <= low * (1 + 1e-9)), end = found.findIndex((tick) => tick >= high * (1 - 1e-9));
  return found.slice(Math.max(0, start), Math.max(end, start + 1) + 1);
}

export function tickWords(values, percent = false) {
  const shown = percent ? values.map((value) => value * 100) : values;
  const largest = Math.max(0, ...shown.map(Math.abs));
  if (largest > 0 && largest < 1e-3) return (value) => (value ? value.toExponential(1).replace("e-", "e−") : "0");
  const [scale, unit] = largest >= 1e6 ? [1e6, "M"] : largest >= 1e4 ? [1e3, "k"] : [1, percent ? "%" : ""];
  let decimals = 0;
  while (decimals < 6 && shown.some((v) => Math.abs(Number((v / scale).toFixed(decimals)) - v / scale) > 1e-9)) decimals++;
  return (value) => {
    const number = (percent ? value * 100 : value) / scale;
    const grouped = number.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
    return (grouped + (number || percent ? unit : "")).replace("-", "−");
  };
}

export function number(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (percent) return `${Number((value * 100).toPrecision(4))}%`;
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1e5 ? Math.round(value).toLocaleString("en-US") : size >= 1e-3 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
  return text.replace("-", "−");
}

// ---- data of a figure

function resolved(figure, columns, smooth) {
  // every series with its points, in the unit that the axis shows
  const scale = figure.y.scale || 1;
  return figure.series.map((series) => {
    const xs = [], ys = [];
    if (series.metric) {
      const values = (columns && columns.values[series.metric]) || [];
      values.forEach((value, index) => {
        if (value !== null && value !== undefined) { xs.push(columns.steps[index]); ys.push(value / scale); }
      });
    } else {
      for (const [x, y] of series.points) { xs.push(x); ys.push(y / scale); }
    }
    const mean = smooth > 1 && series.metric && !figure.between.length ? runningMean(ys, smooth) : null;
    return { ...series, xs, ys, mean };
  });
}

function runningMean(values, count) {
  const means = [];
  let sum = 0;
  values.forEach((value, index) => {
    sum += value;
    if (index >= count) sum -= values[index - count];
    means.push(sum / Math.min(index + 1, count));
  });
  return means;
}

function thinned(xs, ys) {
  // at most two points for each place on the page: the lowest and the highest
  if (xs.length <= MOST_POINTS) return xs.map((x, index) => [x, ys[index]]);
  const points = [], size = Math.ceil((2 * xs.length) / MOST_POINTS);
  for (let start = 0; start < xs.length; start += size) {
    let low = start, high = start;
    for (let index = start; index < Math.min(start + size, xs.length); index++) {
      if (ys[index] < ys[low]) low = index;
      if (ys[index] > ys[high]) high = index;
    }
    for (const index of low === high ? [low] : low < high ? [low, high] : [high, low]) points.push([xs[index], ys[index]]);
  }
  return points;
}

// ---- figures by topic

export class Topics {
  // a heading and a grid for each topic, in the order in which figures come
  constructor() {
    this.node = el("div");
    this.grids = new Map();
  }

  place(figures) {
    // of [topic, node]; nodes that are in place stay untouched, so that focus and scrolling stay too
    const places = new Map();
    for (const [topic, node] of figures) {
      if (!this.grids.has(topic)) this.grids.set(topic, el("div", { class: "figures" }));
      const grid = this.grids.get(topic), place = places.get(topic) || 0;
      if (grid.children[place] !== node) grid.insertBefore(node, grid.children[place] || null);
      places.set(topic, place + 1);
    }
    const sections = [...places.keys()];
    if (sections.length === this.node.children.length && sections.every((topic, index) => this.node.children[index].contains(this.grids.get(topic)))) return;
    this.node.replaceChildren(...sections.map((topic) => el("section", { class: "topic" }, el("h2", topic ? {} : { class: "spoken" }, topic || "Figures"), this.grids.get(topic))));
  }
}

// ---- one figure

export class FigureView {
  // `options`: { smooth, log, zoom: [first, last] or null }; `onZoom` is told when a range of steps is chosen
  constructor(figure, columns, options = {}, onZoom = null) {
    this.onZoom = onZoom;
    this.heading = el("h3");
    this.words = el("p");
    this.legend = el("ul", { class: "legend" });
    this.svg = mark("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.spoken = el("div", { class: "spoken", "aria-live": "polite" });
    this.plot = el("div", { class: "plot" }, this.svg, this.tip, this.spoken);
    this.node = el("figure", {}, el("figcaption", {}, this.heading, this.words), this.legend, this.plot);
    this.at = -1;
    this.listen();
    this.update(figure, columns, options);
  }

  update(figure, columns, options = {}) {
    Object.assign(this, { figure, columns, options });
    this.draw();
  }

  draw() {
    const { figure } = this;
    this.heading.textContent = figure.title;
    this.words.textContent = figure.words;
    this.stops = [];
    this.overlay = null;
    this.svg.replaceChildren();
    if (figure.lanes.length) this.drawLanes();
    else if (figure.bars.length) this.drawBars(figure.bars);
    else if (figure.stacked) this.drawStack();
    else this.drawLines();
    this.cursor = this.add("line", { class: "cursor", x1: 0, x2: 0, y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.drawLegend();
    this.svg.setAttribute("aria-label", this.inWords());
    if (this.at >= this.stops.length) this.leave();
  }

  add(tag, attributes, text) {
    const node = mark(tag, attributes, text);
    this.svg.append(node);
    return node;
  }

  // ---- scales

  frame(xs, ys, { log = false, xEnds = null } = {}) {
    const { x, y } = this.figure;
    const allX = xEnds || [...extent(xs), ...x.include];
    let [x0, x1] = extent(allX.length ? allX : [0, 1]);
    if (x0 === x1) [x0, x1] = [x0 - 0.5, x1 + 0.5];
    this.log = log && ys.some((value) => value > 0);
    const shown = this.log ? ys.filter((value) => value > 0) : [...extent(ys), ...y.include];
    const [low, high] = extent(shown.length ? shown : [0, 1]);
    this.yTicks = this.log ? logTicks(low, high) : ticks(low, high, 5, y.whole);
    Object.assign(this, { x0, x1, y0: this.yTicks[0], y1: this.yTicks[this.yTicks.length - 1] });
    this.xTicks = ticks(x0, x1, 7, x.whole).filter((tick) => x0 <= tick && tick <= x1);
  }

  px(value) { return LEFT + ((value - this.x0) / (this.x1 - this.x0)) * (WIDTH - LEFT - RIGHT); }

  py(value) {
    const scale = this.log ? Math.log10 : (v) => v;
    if (this.log && value <= 0) value = this.y0;
    return HEIGHT - BOTTOM - ((scale(value) - scale(this.y0)) / (scale(this.y1) - scale(this.y0))) * (HEIGHT - TOP - BOTTOM);
  }

  axes() {
    const { x, y } = this.figure, right = WIDTH - RIGHT, bottom = HEIGHT - BOTTOM;
    const sayX = tickWords(this.xTicks, x.percent), sayY = this.log ? (v) => number(v, y.percent) : tickWords(this.yTicks, y.percent);
    if (!this.figure.lanes.length) {
      for (const tick of this.yTicks) {
        const at = this.py(tick).toFixed(1);
        this.add("line", { class: "grid", x1: LEFT, x2: right, y1: at, y2: at });
        this.add("text", { class: "axis", x: LEFT - 8, y: at, dy: 4, "text-anchor": "end" }, sayY(tick));
      }
    }
    const named = x.names.length ? x.names : this.xTicks.map((tick) => [tick, sayX(tick)]);
    const room = (WIDTH - LEFT - RIGHT) / Math.max(1, named.length) / 6.2; // characters that fit
    const crowded = x.names.length && named.some(([, said]) => said.length > room - 1); // then every second label is lower
    named.forEach(([tick, said], index) => {
      const at = this.px(tick).toFixed(1), tall = crowded && index % 2 === 1;
      if (said.length > 2 * room && x.names.length && index % Math.ceil(said.length / room / 2)) return;
      this.add("line", { class: "tick", x1: at, x2: at, y1: bottom, y2: bottom + 4 });
      this.add("text", { class: x.names.length ? "axis many" : "axis", x: at, y: bottom + (tall ? 24 : 14), "text-anchor": "middle" }, said);
    });
    this.add("line", { class: "base", x1: LEFT, x2: right, y1: bottom, y2: bottom });
    this.add("text", { class: "name", x: right, y: HEIGHT - 1, "text-anchor": "end" }, x.label);
    this.add("text", { class: "name", x: 4, y: 12 }, this.log ? `${y.label} (log)` : y.label);
  }

  // ---- kinds of figures

  drawLines() {
    const { figure, options } = this, zoom = this.zoomable ? options.zoom : null;
    const inside = (x) => !zoom || (zoom[0] <= x && x <= zoom[1]);
    const all = resolved(figure, this.columns, options.smooth);
    for (const one of all) {
      if (!zoom) continue;
      const kept = one.xs.map((x, index) => index).filter((index) => inside(one.xs[index]));
      one.mean = one.mean && kept.map((index) => one.mean[index]);
      [one.xs, one.ys] = [kept.map((index) => one.xs[index]), kept.map((index) => one.ys[index])];
    }
    const ends = this.zoomable && this.columns.steps.length ? zoom || extent(this.columns.steps) : null;
    this.frame(all.flatMap((one) => extent(one.xs)), all.flatMap((one) => (options.log ? one.ys : extent(one.ys))), { log: options.log, xEnds: ends });
    this.axes();
    if (figure.rule !== null && !this.log) {
      const at = this.py(figure.rule);
      if (TOP <= at && at <= HEIGHT - BOTTOM) this.add("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at });
    }
    if (figure.between.length) this.shade(all[figure.between[0]], all[figure.between[1]]);
    for (const one of all) {
      this.line(one, one.ys, one.mean !== null);
      if (one.mean) this.line(one, one.mean, false);
    }
    for (const point of figure.marks.filter((point) => inside(point.x) && this.x0 <= point.x && point.x <= this.x1)) {
      const path = this.add("path", { class: "mark", d: `M${this.px(point.x).toFixed(1)} ${TOP + 1}l-4 -7h8z` });
      path.append(mark("title", {}, point.title));
    }
    this.stopsOfLines(all);
  }

  line(one, ys, faint) {
    if (!one.xs.length) return;
    const path = thinned(one.xs, ys).map(([x, y], index) => {
      const at = [this.px(x).toFixed(1), this.py(y).toFixed(1)];
      return index === 0 ? `M${at.join(" ")}` : one.stepwise ? `H${at[0]}V${at[1]}` : `L${at.join(" ")}`;
    });
    this.add("path", { class: `${one.colour} line${faint ? " faint" : ""}`, d: path.join("") });
    if (one.xs.length <= MOST_DOTS && !faint && !one.stepwise) {
      one.xs.forEach((x, index) => this.add("circle", { class: `${one.colour} dot`, cx: this.px(x).toFixed(1), cy: this.py(ys[index]).toFixed(1), r: 2.4 }));
    }
  }

  shade(upper, lower) {
    const around = [...thinned(upper.xs, upper.ys), ...thinned(lower.xs, lower.ys).reverse()];
    if (around.length) this.add("path", { class: "shade", d: `M${around.map(([x, y]) => `${this.px(x).toFixed(1)} ${this.py(y).toFixed(1)}`).join("L")}Z` });
  }

  stopsOfLines(all) {
    // places to read values off: every x that some line has a point at, or 200 along a curve
    const { x, y, marks } = this.figure;
    const values = new Map();
    for (const one of all) {
      one.xs.forEach((at, index) => {
        if (!values.has(at)) values.set(at, []);
        const mean = one.mean ? ` (mean ${number(one.mean[index], y.percent)})` : "";
        values.get(at).push([one.colour, `${one.label} ${number(one.ys[index], y.percent)}${mean}`]);
      });
    }
    const noted = new Map(marks.map((point) => [point.x, point.title]));
    this.stops = [...values.keys()].sort((a, b) => a - b).map((at) => ({
      x: this.px(at),
      title: `${x.label} ${number(at, x.percent)}${noted.has(at) ? `, ${noted.get(at)}` : ""}`,
      rows: values.get(at),
    }));
  }

  drawStack() {
    const { figure, options } = this, all = resolved(figure, this.columns, 0);
    const [first, last] = options.zoom || extent(this.columns.steps);
    const places = this.columns.steps.map((step, index) => index).filter((index) => first <= this.columns.steps[index] && this.columns.steps[index] <= last);
    const share = Math.max(1, Math.ceil(places.length / MOST_BARS));
    const scale = figure.y.scale || 1, bars = [];
    for (let start = 0; start < places.length; start += share) {
      const some = places.slice(start, start + share);
      const parts = all.map((one) => some.reduce((sum, index) => sum + ((this.columns.values[one.metric] || [])[index] || 0), 0) / some.length / scale);
      const step = this.columns.steps[some[0]], to = this.columns.steps[some[some.length - 1]];
      const said = parts.map((part, index) => `${all[index].label} ${number(part)}`).join("\n");
      const sum = parts.reduce((a, b) => a + b, 0);
      bars.push({ x: step - 0.5, width: to - step + 1, parts, title: `step ${step}${some.length > 1 ? ` to ${to}, mean` : ""}: ${number(sum)}\n${said}` });
    }
    this.drawBars(bars);
    if (share > 1) this.words.textContent += ` A bar is the mean of ${share} steps.`;
  }

  drawBars(bars) {
    const { figure } = this;
    const total = (bar) => bar.parts.reduce((a, b) => a + b, 0);
    this.frame(bars.flatMap((bar) => [bar.x, bar.x + bar.width]), [0, ...bars.map(total)]);
    this.axes();
    for (const bar of bars) {
      const left = this.px(bar.x), right = this.px(bar.x + bar.width), gap = Math.min(1, (right - left) * 0.15);
      let base = 0;
      bar.parts.forEach((part, index) => {
        const top = this.py(base + part), bottom = this.py(base);
        base += part;
        if (bottom - top >= 0.05) this.add("rect", { class: `${figure.series[index].colour} bar`, x: (left + gap / 2).toFixed(1), y: top.toFixed(1), width: Math.max(0.2, right - left - gap).toFixed(1), height: (bottom - top).toFixed(1) });
      });
      const [title, ...rows] = bar.title.split("\n");
      this.stops.push({ x: (left + right) / 2, title, rows: rows.map((row) => ["", row]) });
    }
  }

  drawLanes() {
    const { lanes } = this.figure, ends = lanes.flatMap((lane) => lane.spans.map((span) => span.start + span.length));
    this.frame([0, ...ends], [0, lanes.length]);
    for (const tick of this.xTicks) this.add("line", { class: "grid", x1: this.px(tick), x2: this.px(tick), y1: TOP, y2: HEIGHT - BOTTOM });
    this.axes();
    const each = (HEIGHT - TOP - BOTTOM) / lanes.length;
    lanes.forEach((lane, index) => {
      const top = TOP + index * each + each * 0.14, height = each * 0.72;
      this.add("text", { class: "axis", x: LEFT - 8, y: (top + height / 2).toFixed(1), dy: 4, "text-anchor": "end" }, lane.name);
      for (const span of lane.spans) {
        const left = this.px(span.start), right = this.px(span.start + span.length);
        this.add("rect", { class: `${span.colour} bar`, x: left.toFixed(1), y: top.toFixed(1), width: Math.max(0.4, right - left).toFixed(1), height: height.toFixed(1) });
        this.stops.push({ x: (left + right) / 2, left, right, top, bottom: top + height, title: span.title, rows: [] });
      }
    });
  }

  drawLegend() {
    const { series } = this.figure;
    const entries = series.length > 1 ? series : [];
    this.legend.replaceChildren(...entries.map((one) => el("li", { class: one.colour }, el("i"), el("b", {}, one.label))));
    this.legend.hidden = !entries.length;
  }

  inWords() {
    // for those who do not see it: the range and the ends of each line
    const { figure } = this;
    const said = figure.bars.length || figure.lanes.length || figure.stacked
      ? [`${this.stops.length} ${figure.lanes.length ? "spans" : "bars"}`]
      : resolved(figure, this.columns, 0).filter((one) => one.ys.length).map((one) => {
        const [low, high] = extent(one.ys), last = one.ys[one.ys.length - 1];
        return `${one.label}: from ${number(one.ys[0], figure.y.percent)} to ${number(last, figure.y.percent)}, between ${number(low, figure.y.percent)} and ${number(high, figure.y.percent)}`;
      });
    return `${figure.title}, ${figure.y.label} over ${figure.x.label}. ${said.join("; ")}. Arrow keys read values.`;
  }

  // ---- reading values, choosing a range

  get zoomable() { return this.figure.x.label === "step" && !this.figure.bars.length && (this.figure.stacked || this.figure.series.some((one) => one.metric)); }

  listen() {
    let from = null;
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * WIDTH, ((event.clientY - box.top) / box.height) * HEIGHT];
    };
    this.svg.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (from === null) this.show(this.nearest(x, y), false);
      else this.brush(from, x);
    });
    this.svg.addEventListener("pointerdown", (event) => {
      if (!this.zoomable || !this.onZoom || event.button) return;
      [from] = place(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [to] = place(event), ends = [from, to].sort((a, b) => a - b);
      from = null;
      if (this.overlay) this.overlay.remove();
      this.overlay = null;
      if (ends[1] - ends[0] > 6) this.onZoom(ends.map((x) => this.valueAt(x)));
    });
    this.svg.addEventListener("dblclick", () => this.onZoom && this.onZoom(null));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
      if (event.key === "Escape" && this.onZoom) this.onZoom(null);
      if (!(event.key in moves) || !this.stops.length) return;
      event.preventDefault();
      const start = this.at < 0 && event.key === "ArrowLeft" ? this.stops.length : this.at;
      this.show(Math.min(this.stops.length - 1, Math.max(0, start + moves[event.key])), true);
    });
  }

  valueAt(x) {
    const value = this.x0 + ((x - LEFT) / (WIDTH - LEFT - RIGHT)) * (this.x1 - this.x0);
    return Math.round(Math.min(this.x1, Math.max(this.x0, value)));
  }

  brush(from, to) {
    const [left, right] = [from, to].sort((a, b) => a - b).map((x) => Math.min(WIDTH - RIGHT, Math.max(LEFT, x)));
    if (!this.overlay) this.overlay = this.add("rect", { class: "brush", y: TOP, height: HEIGHT - TOP - BOTTOM });
    this.overlay.setAttribute("x", left);
    this.overlay.setAttribute("width", right - left);
    this.leave();
  }

  nearest(x, y) {
    let best = -1, distance = Infinity;
    this.stops.forEach((stop, index) => {
      if (stop.left !== undefined && !(stop.left - 1 <= x && x <= stop.right + 1 && stop.top <= y && y <= stop.bottom)) return;
      if (Math.abs(stop.x - x) < distance) [best, distance] = [index, Math.abs(stop.x - x)];
    });
    return x < LEFT - 4 || x > WIDTH - RIGHT + 4 ? -1 : best;
  }

  show(index, speak) {
    if (index < 0) return this.leave();
    this.at = index;
    const stop = this.stops[index];
    this.tip.replaceChildren(el("b", {}, stop.title), ...stop.rows.map(([colour, text]) => el("div", { class: colour }, colour ? el("i") : "", el("span", {}, text))));
    this.tip.hidden = false;
    const left = (stop.x / WIDTH) * 100;
    this.tip.style.left = left > 55 ? "auto" : `calc(${left}% + 10px)`;
    this.tip.style.right = left > 55 ? `calc(${100 - left}% + 10px)` : "auto";
    this.cursor.setAttribute("x1", stop.x);
    this.cursor.setAttribute("x2", stop.x);
    this.cursor.setAttribute("visibility", "visible");
    if (speak) this.spoken.textContent = [stop.title, ...stop.rows.map((row) => row[1])].join(", ");
    return undefined;
  }

  leave() {
    this.at = -1;
    this.tip.hidden = true;
    if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
  }
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : [];
}

// ---- completions

const DRAFTED = ["drawn by the policy's own pass", "accepted draft", "accepted draft, written ahead in the step before"]; // by Completion.drafted
export const TOKEN_COLOURS = [["drafted", "accepted draft"], ["logprob", "log-probability"], ["entropy", "entropy"], ["none", "none"]];

function tokenClass(completion, index, mode) {
  if (mode === "drafted") return `d${completion.drafted[index]}`;
  if (mode === "logprob") return `s${Math.min(7, Math.floor(-completion.logprobs[index] * 1.6))}`;
  if (mode === "entropy" && completion.entropy) return `e${Math.min(7, Math.floor(completion.entropy[index] * 2.5))}`;
  return "";
}

export function tokenInWords(completion, index) {
  const logprob = completion.logprobs[index], text = completion.texts[index];
  const parts = [JSON.stringify(text), `log-probability ${number(logprob)} (${number(Math.exp(logprob), true)})`];
  parts.push(completion.entropy ? `entropy ${number(completion.entropy[index])} nats` : "entropy not computed");
  parts.push(DRAFTED[completion.drafted[index]] || DRAFTED[0]);
  return `token ${index < completion.head ? index + 1 : completion.tokens - completion.texts.length + index + 1}: ${parts.join(", ")}`;
}

export class TokensView {
  // the text of a completion, a span for each token; arrow keys and the pointer read single tokens
  constructor(completion, mode) {
    this.completion = completion;
    this.at = -1;
    this.said = el("p", { class: "token-words", "aria-live": "polite" }, "Point at a token, or use the arrow keys, to read its numbers.");
    this.spans = completion.texts.map((text) => el("span", {}, text === "" ? "·" : text.replaceAll("\n", "⏎\n")));
    const left = completion.tokens - completion.texts.length;
    const gap = left ? el("em", {}, ` [… ${number(left)} tokens are not kept …] `) : null;
    const parts = [...this.spans.slice(0, completion.head), gap, ...this.spans.slice(completion.head)].filter(Boolean);
    this.text = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the completion" }, ...parts);
    this.node = el("div", {}, this.text, this.said);
    this.text.addEventListener("pointerover", (event) => this.show(this.spans.indexOf(event.target)));
    this.text.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
      if (!(event.key in moves)) return;
      event.preventDefault();
      this.show(Math.min(this.spans.length - 1, Math.max(0, this.at + moves[event.key])));
    });
    this.colour(mode);
  }

  colour(mode) { this.spans.forEach((span, index) => { span.className = tokenClass(this.completion, index, mode); }); }

  show(index) {
    if (index < 0) return;
    if (this.at >= 0) this.spans[this.at].removeAttribute("aria-current");
    this.at = index;
    this.spans[index].setAttribute("aria-current", "true");
    this.said.textContent = tokenInWords(this.completion, index);
  }
}

export function tokenLegend(mode) {
  const entries = {
    drafted: DRAFTED.map((words, flag) => [`d${flag}`, words]),
    logprob: [["s0", "probable"], ["s2", "p < 0.29"], ["s4", "p < 0.08"], ["s7", "p < 0.013"]],
    entropy: [["e0", "certain"], ["e2", "≥ 0.8 nats"], ["e4", "≥ 1.6"], ["e7", "≥ 2.8"]],
    none: [],
  }[mode];
  return el("p", { class: "tokens legend-line" }, ...entries.map(([name, words]) => el("span", { class: name }, ` ${words} `)));
}

function preview(completion) {
  const text = completion.texts.slice(0, 60).join("").replace(/\s+/g, " ").trim();
  return text.length > 110 ? `${text.slice(0, 110)} …` : text;
}

export function completionView(completion, mode, open = false) {
  // heading, and the tokens once it is opened
  const drafted = [...completion.drafted].filter((flag) => flag !== "0").length;
  const title = `group ${completion.group}, completion ${completion.index}: reward ${number(completion.reward)}, ${number(completion.tokens)} tokens, ended by ${completion.finish}`;
  const version = completion.version === undefined ? "" : `, policy version ${completion.version}`;
  const share = completion.drafted.length ? `, ${Math.round((100 * drafted) / completion.drafted.length)}% from drafts` : "";
  const node = el("details", { class: "completion", "data-group": completion.group, "data-index": completion.index }, el("summary", {}, el("b", {}, title), el("span", {}, share, version, completion.entropy ? "" : ", no entropy: no advantage"), el("q", {}, preview(completion))));
  let view = null;
  const fill = () => {
    if (view || !node.open) return;
    view = new TokensView(completion, node.dataset.mode || mode);
    node.append(view.node);
  };
  node.colour = (name) => { node.dataset.mode = name; if (view) view.colour(name); };
  node.addEventListener("toggle", fill);
  if (open) { node.open = true; fill(); }
  return node;
}
