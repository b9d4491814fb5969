// `tlt watch`: runs, a run, a step, its completions, the drafter. Reads JSON (tlt.watch.views) from the server or an
// export and draws with draw.js. Invariants: the address selects the view; data is requested only while the page is
// visible; columns of steps are sent once.
import { FigureView, TOKEN_COLOURS, Topics, completionView, el, number, tickWords, ticks, tokenLegend } from "./draw.js";

const LIVE = document.querySelector('meta[name="tlt-live"]').content === "yes";
const POLL_MS = 1000, MOST_COMPARED = 8, MOST_CARDS = 200;
const LINE_COLOURS = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8"];
const LEAST_SMOOTHED = 20; // steps from which curves are smoothed by default
const main = document.getElementById("main"), trail = document.getElementById("trail"), trouble = document.getElementById("trouble");
const kept = new Map(); // run → what was read of it
let view = null; // { poll() } of the address
let shown = 0; // changes with the address: answers to an earlier one are dropped

// ---- reading

async function read(path) {
  const response = await fetch(path, { cache: LIVE ? "no-store" : "default" });
  const value = await response.json().catch(() => null);
  if (!response.ok || value === null) throw new Error((value && value.error) || `${path}: ${response.status} ${response.statusText}`);
  return value;
}

const runPath = (name) => `data/${encodeURIComponent(name)}`;

async function readRun(name) {
  // whether anything was new
  const had = kept.get(name);
  if (had && !LIVE) return false;
  const query = had ? `?rows=${had.steps.length}&lives=${had.lives}&at=${had.at}` : "";
  const told = await read(`${runPath(name)}/run.json${query}`);
  if (told.unchanged) return false;
  const columns = {};
  for (const [metric, values] of Object.entries(told.columns)) {
    const before = had && had.columns.values[metric] ? had.columns.values[metric].slice(0, told.from) : new Array(told.from).fill(null);
    columns[metric] = told.from ? before.concat(values) : values;
  }
  const steps = told.from ? had.steps.slice(0, told.from).concat(told.steps) : told.steps;
  kept.set(name, { ...told, steps, columns: { steps, values: columns } });
  return true;
}

// ---- words

const ago = (time) => {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  return seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : new Date(time * 1000).toISOString().slice(0, 16).replace("T", " ");
};
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
const link = (address, text, attributes = {}) => el("a", { href: `#/${address.map(encodeURIComponent).join("/")}`, ...attributes }, text);
const table = (head, rows, attributes = {}) => el("table", attributes, el("thead", {}, el("tr", {}, ...head.map((cell) => (cell instanceof Node ? cell : el("th", { scope: "col" }, cell))))), el("tbody", {}, ...rows));
const row = (cells) => el("tr", {}, ...cells.map((cell, index) => el(index ? "td" : "th", index ? {} : { scope: "row" }, cell)));
// A run that was killed has no last event: after an unusually long silence it is not called running any more.
const silence = (run) => (run.state === "running" && run.last && Date.now() / 1000 - run.last > run.silent_s ? `the last event was ${ago(run.last)}; the run was killed, or it waits` : "");
const state = (run) => {
  const silent = silence(run);
  return el("span", { class: `state ${silent ? "silent" : run.state}`, title: silent || null }, silent ? "silent" : run.state);
};
const tiles = (each) => el("dl", { class: "tiles" }, ...each.map(([name, value, note]) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
const folded = (title, body, open = false) => el("details", { open }, el("summary", {}, title), el("div", { class: "scroll" }, body));

// Replaces the content where it changed: what is read or about to be pressed stays. The focus goes to the namesake.
function renew(node, ...children) {
  const fresh = node.cloneNode(false), at = document.activeElement;
  fresh.append(...children.filter(Boolean));
  if (fresh.isEqualNode(node)) return;
  const name = (one) => `${one.tagName} ${one.getAttribute("aria-label") || one.textContent}`;
  const focused = node !== at && node.contains(at) ? name(at) : null;
  node.replaceChildren(...fresh.childNodes);
  if (focused) [...node.querySelectorAll(at.tagName)].find((one) => name(one) === focused)?.focus();
}

function fill(...children) { main.replaceChildren(...children.filter(Boolean)); }

function where(...steps) {
  const parts = [["runs", []], ...steps];
  trail.replaceChildren(...parts.flatMap(([name, address], index) => [
    index ? el("span", { "aria-hidden": "true" }, "›") : null,
    index === parts.length - 1 ? el("b", { "aria-current": "page" }, name) : link(address, name),
  ]).filter(Boolean));
  document.title = `${parts[parts.length - 1][0]} · tlt watch`;
}

// Figures in a grid. Those out of sight are drawn when they come into sight.
class Gallery {
  constructor(toolbar = true) {
    this.options = { smooth: null, log: false, zoom: null }; // smooth: null until it is chosen
    this.views = new Map();
    this.topics = new Topics();
    this.node = el("div", {}, toolbar ? this.toolbar() : "", this.topics.node);
    this.waiting = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) this.mark(entry.target, entry.isIntersecting);
    }, { rootMargin: "200px" });
    this.visible = new Set();
  }

  toolbar() {
    const smooth = el("select", { onchange: () => this.set({ smooth: Number(smooth.value) }) }, ...[1, 5, 20, 100].map((count) => el("option", { value: count }, count === 1 ? "none" : `mean of ${count}`)));
    this.smoothing = smooth;
    const log = el("input", { type: "checkbox", onchange: () => this.set({ log: log.checked }) });
    this.first = el("input", { type: "number", min: 0, "aria-label": "first step" });
    this.last = el("input", { type: "number", min: 0, "aria-label": "last step" });
    const range = () => {
      const first = Number(this.first.value || 0), last = Number(this.last.value || Infinity);
      this.set({ zoom: (this.first.value || this.last.value) && first < last ? [first, Math.min(last, this.end || last)] : null });
    };
    this.first.addEventListener("change", range);
    this.last.addEventListener("change", range);
    const reset = el("button", { type: "button", onclick: () => this.zoom(null) }, "All steps");
    return el("div", { class: "toolbar", role: "group", "aria-label": "How figures are drawn" },
      el("label", {}, "Smoothing ", smooth), el("label", {}, log, " log scale"),
      el("span", {}, "Steps ", this.first, " to ", this.last, " ", reset), el("span", { class: "hint" }, "Drag over a figure to zoom; double-click for all."));
  }

  zoom(range) {
    if (this.first) {
      this.first.value = range ? range[0] : "";
      this.last.value = range ? range[1] : "";
    }
    this.set({ zoom: range && range[0] < range[1] ? range : null });
  }

  set(options) {
    Object.assign(this.options, options);
    for (const title of this.views.keys()) this.waiting.set(title, this.views.get(title).figure);
    this.flush();
  }

  show(figures, columns) {
    this.columns = columns;
    this.end = columns.steps[columns.steps.length - 1];
    const titles = new Set(figures.map((figure) => figure.title));
    if (this.smoothing && this.options.smooth === null) this.smoothing.value = this.smoothed();
    for (const [title, one] of this.views) if (!titles.has(title)) { one.node.remove(); this.seen.unobserve(one.node); this.views.delete(title); }
    figures.forEach((figure) => {
      const one = this.views.get(figure.title);
      if (one) { this.waiting.set(figure.title, figure); return; }
      const added = new FigureView(figure, columns, this.drawn(), (range) => this.zoom(range));
      added.node.dataset.title = figure.title;
      this.views.set(figure.title, added);
      this.seen.observe(added.node);
    });
    this.topics.place(figures.map((figure) => [figure.topic, this.views.get(figure.title).node]));
    this.flush();
  }

  smoothed() { return this.options.smooth ?? (this.columns.steps.length >= LEAST_SMOOTHED ? 5 : 1); }

  drawn() { return { ...this.options, smooth: this.smoothed() }; }

  mark(node, visible) {
    if (visible) this.visible.add(node.dataset.title);
    else this.visible.delete(node.dataset.title);
    if (visible) this.flush();
  }

  flush() { for (const title of [...this.waiting.keys()]) if (this.visible.has(title)) this.drawOne(title); }

  drawAll() { for (const title of [...this.waiting.keys()]) this.drawOne(title); }

  drawOne(title) {
    const figure = this.waiting.get(title);
    this.waiting.delete(title);
    this.views.get(title)?.update(figure, this.columns, this.drawn());
  }
}

// ---- runs

const RUN_COLUMNS = [
  ["run", (run) => run.name, (run) => (run.error ? run.name : el("span", {}, link(["run", run.name], run.name), run.verb && run.verb !== "train" ? ` tlt ${run.verb}` : ""))],
  ["state", (run) => run.state, state],
  ["steps", (run) => run.taken, (run) => `${run.taken} / ${run.planned}`],
  ["reward", (run) => run.reward_last, (run) => (run.reward_last === null ? "–" : `${fixed(run.reward_first, 3)} → ${fixed(run.reward_last, 3)}`)],
  ["accept length", (run) => run.accept_length, (run) => fixed(run.accept_length, 2)],
  ["whole step", (run) => run.whole_ratio, (run) => (run.whole_ratio === null ? "–" : `${fixed(run.whole_ratio, 2)} ×`)],
  ["tokens/s", (run) => run.tokens_per_s, (run) => (run.tokens_per_s === null ? "–" : number(Math.round(run.tokens_per_s)))],
  ["started", (run) => run.started, (run) => (run.started ? ago(run.started) : "–")],
];

class RunsView {
  constructor(chosen = []) {
    where();
    this.sorted = [RUN_COLUMNS.length - 1, -1];
    this.chosen = new Set(chosen.slice(0, MOST_COMPARED));
    this.metric = "reward/mean";
    this.body = el("div");
    this.comparison = el("div");
    this.gallery = new Gallery();
    this.find = el("input", { type: "search", placeholder: "name or setting", oninput: () => this.draw() });
    fill(el("header", {}, el("h1", {}, "Runs")), el("div", { class: "toolbar" }, el("label", {}, "Find ", this.find), el("span", { class: "hint" }, `Tick up to ${MOST_COMPARED} runs to compare their curves and settings.`)), this.body, this.comparison);
  }

  async poll() {
    const mine = shown;
    const { runs, defaults } = await read("data/runs.json");
    if (mine !== shown) return;
    [this.runs, this.defaults] = [runs, defaults];
    const there = new Set(runs.filter((run) => !run.error).map((run) => run.name));
    for (const name of this.chosen) if (!there.has(name)) this.chosen.delete(name);
    this.draw();
    if (this.chosen.size) await this.compare();
  }

  draw() {
    const words = this.find.value.toLowerCase();
    const runs = this.runs.filter((run) => !words || run.name.toLowerCase().includes(words) || Object.entries(run.knobs || {}).some(([key, value]) => `${key} ${value}`.toLowerCase().includes(words)));
    const [place, way] = this.sorted, key = RUN_COLUMNS[place][1];
    runs.sort((a, b) => way * (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0));
    const head = [el("th", { scope: "col" }, el("span", { class: "spoken" }, "compare")), ...RUN_COLUMNS.map(([name], index) => {
      const order = index === place ? (way > 0 ? "ascending" : "descending") : "none";
      const sort = () => { this.sorted = [index, index === place ? -way : index ? -1 : 1]; this.draw(); this.body.querySelectorAll("th button")[index].focus(); };
      return el("th", { scope: "col", "aria-sort": order }, el("button", { type: "button", onclick: sort }, name, index === place ? (way > 0 ? " ▲" : " ▼") : ""));
    })];
    const rows = runs.map((run) => {
      if (run.error) return el("tr", {}, el("td"), el("th", { scope: "row" }, run.name), el("td", { colspan: RUN_COLUMNS.length - 1, class: "error" }, run.error));
      const tick = el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, checked: this.chosen.has(run.name), disabled: !this.chosen.has(run.name) && this.chosen.size >= MOST_COMPARED, onchange: () => this.choose(run.name, tick.checked) });
      return el("tr", { title: run.failure || null }, el("td", {}, tick), ...RUN_COLUMNS.map(([, , say], index) => el(index ? "td" : "th", index ? {} : { scope: "row" }, say(run))));
    });
    renew(this.body, runs.length ? el("div", { class: "scroll" }, table(head, rows, { class: "runs" })) : el("p", {}, "No run here yet: a directory with events.jsonl shows as soon as `tlt train` makes it."));
  }

  async choose(name, chosen) {
    if (chosen) this.chosen.add(name);
    else this.chosen.delete(name);
    history.replaceState(null, "", this.chosen.size ? `#/compare/${[...this.chosen].map(encodeURIComponent).join("/")}` : "#/");
    await guarded(() => this.compare());
    this.draw();
  }

  async compare() {
    const names = [...this.chosen];
    if (!names.length) { this.comparison.replaceChildren(); this.select = null; return; }
    await Promise.all(names.map(readRun));
    const metrics = [...new Set(names.flatMap((name) => Object.keys(kept.get(name).columns.values)))].sort();
    if (!this.select || this.select.options.length !== metrics.length) {
      this.select = el("select", { onchange: () => { this.metric = this.select.value; this.drawComparison(); } }, ...metrics.map((metric) => el("option", { value: metric, selected: metric === this.metric }, metric)));
      this.knobs = el("div", { class: "scroll" });
      this.comparison.replaceChildren(el("section", {}, el("h2", {}, "Compared"), el("div", { class: "toolbar" }, el("label", {}, "Curve ", this.select)), this.gallery.node, el("h3", {}, "Settings that differ"), this.knobs));
    }
    this.drawComparison();
  }

  drawComparison() {
    // all runs on the steps of the longest one: each run is a column of its own
    const names = [...this.chosen], steps = [...new Set(names.flatMap((name) => kept.get(name).steps))].sort((a, b) => a - b);
    const place = new Map(steps.map((step, index) => [step, index])), values = {};
    names.forEach((name) => {
      const run = kept.get(name), told = run.columns.values[this.metric] || [];
      values[name] = new Array(steps.length).fill(null);
      told.forEach((value, index) => { values[name][place.get(run.steps[index])] = value; });
    });
    const axis = { include: [], whole: false, percent: false, names: [], scale: 1 };
    const series = names.map((name, index) => ({ label: name, colour: LINE_COLOURS[index % LINE_COLOURS.length], metric: name, points: [], stepwise: false }));
    const figure = { title: "Comparison", words: this.metric, x: { ...axis, label: "step", whole: true }, y: { ...axis, label: this.metric }, series, stacked: false, bars: [], lanes: [], marks: [], rule: null, between: [], topic: "" };
    this.gallery.show([figure], { steps, values });
    const settings = names.map((name) => kept.get(name).knobs);
    const keys = [...new Set(settings.flatMap(Object.keys))].filter((key) => key !== "run.name" && new Set(settings.map((one) => one[key])).size > 1).sort();
    this.knobs.replaceChildren(keys.length ? table(["setting", ...names], keys.map((key) => row([el("code", {}, key), ...settings.map((one) => (key in one ? el("code", {}, one[key]) : el("span", {}, el("code", {}, this.defaults[key] ?? ""), " (default)")))]))) : el("p", {}, "None."));
  }
}

// ---- one run

class RunView {
  constructor(name) {
    this.name = name;
    where([name, ["run", name]]);
    this.title = el("h1", {}, name);
    this.state = el("span");
    this.words = el("p", { class: "words" });
    this.lights = el("ul", { class: "lights", "aria-label": "Health" });
    this.now = el("p", { class: "now", "aria-live": "off" });
    this.tiles = el("div");
    this.links = el("p", { class: "links" });
    this.form = el("span"); // until there is a step
    this.below = el("section");
    this.gallery = new Gallery();
    fill(el("header", {}, this.title, this.state), el("div", { class: "links" }, this.links, this.form), this.now, this.lights, this.words, this.tiles, this.gallery.node, this.below);
  }

  async poll() {
    const mine = shown, news = await readRun(this.name);
    if (mine !== shown) return;
    if (news || !this.drawn) this.draw();
    this.drawState(kept.get(this.name));
  }

  drawState(run) {
    // again without news, too: how long ago the last event was changes
    const silent = silence(run), doing = run.now ? `${run.now.step ? `Step ${run.now.step}: ` : ""}${run.now.phase} …` : "";
    const words = `${run.taken} of ${run.planned} steps`;
    const key = [words, run.state, silent, doing].join("|");
    if (key === this.said) return;
    this.said = key;
    this.state.replaceChildren(state(run), ` ${words}`);
    this.now.textContent = silent ? `Silent: ${silent}. ${doing ? `Last activity: ${doing}` : ""}` : doing;
    this.now.hidden = !this.now.textContent;
  }

  draw() {
    const run = kept.get(this.name);
    this.drawn = true;
    this.words.textContent = run.words;
    const levels = { off: "off", good: "good", warn: "look at this", bad: "bad" };
    renew(this.lights, ...run.lights.map(([name, level, says, remedy]) => el("li", { class: level }, el("i"), el("div", {}, el("b", {}, name, el("span", {}, `: ${levels[level]}`)), says, remedy ? el("small", {}, remedy) : ""))));
    renew(this.tiles, run.tiles.length ? tiles(run.tiles) : "");
    const last = run.steps[run.steps.length - 1];
    renew(this.links, ...(last ? [link(["run", this.name, "step", last], "Last step"), link(["run", this.name, "step", run.kept[run.kept.length - 1] || last, "completions"], "Completions")] : []), link(["run", this.name, "drafter"], "Drafter"));
    if (last) this.drawForm(run.steps[0], last);
    this.gallery.show(run.figures, run.columns);
    this.drawBelow(run);
  }

  drawForm(first, last) {
    // made once: a number may be half typed when the next step ends
    if (!this.field) {
      this.field = el("input", { type: "number", "aria-label": "step", placeholder: "step" });
      const go = (event) => { event.preventDefault(); if (this.field.value) location.hash = `#/run/${encodeURIComponent(this.name)}/step/${Number(this.field.value)}`; };
      this.form.replaceWith(el("form", { onsubmit: go }, "Step ", this.field, el("button", { type: "submit" }, "Show")));
    }
    [this.field.min, this.field.max] = [first, last];
  }

  drawBelow(run) {
    const open = new Set([...this.below.querySelectorAll("details[open] > summary")].map((node) => node.textContent));
    const parts = [
      run.failure.length && run.failure[0].includes("\n") ? folded("What stopped it", el("pre", {}, run.failure[0]), true) : null,
      run.notices.length ? folded("What the run said", table(["when", "what"], run.notices.slice().reverse().map(([time, words]) => row([new Date(time * 1000).toISOString().slice(0, 19).replace("T", " "), words]))), open.has("What the run said")) : null,
      folded("What differs from the defaults", table(["setting", "value"], Object.entries(run.knobs).map(([key, value]) => row([el("code", {}, key), el("code", {}, value)]))), open.has("What differs from the defaults")),
      folded("Machine and versions", table(["name", "value"], run.machine.map(row)), open.has("Machine and versions")),
    ];
    renew(this.below, ...parts);
  }
}

// ---- one step

async function readStep(name, step) {
  return read(`${runPath(name)}/step_${step}.json`);
}

function stepTrail(name, step, more = []) {
  where([name, ["run", name]], [`step ${step}`, ["run", name, "step", step]], ...more);
}

function neighbours(name, step, kind = []) {
  const steps = kind.length ? kept.get(name).kept : kept.get(name).steps, place = steps.indexOf(step);
  const to = (other, words) => (other === undefined ? el("span", { class: "hint" }, words) : link(["run", name, "step", other, ...kind], words));
  return el("p", { class: "links" }, to(steps[place - 1], "‹ earlier"), to(steps[place + 1], "later ›"), kind.length ? link(["run", name, "step", step], "The step") : link(["run", name, "step", step, "completions"], "Completions"));
}

class StepView {
  constructor(name, step) {
    [this.name, this.step] = [name, step];
    stepTrail(name, step);
  }

  async poll() {
    const mine = shown, news = await readRun(this.name);
    if (mine !== shown) return;
    if (this.done) {
      if (news) renew(this.links, neighbours(this.name, this.step));
      return;
    }
    const told = await readStep(this.name, this.step);
    if (mine !== shown) return;
    this.done = true;
    this.links = el("div", {}, neighbours(this.name, this.step));
    const numbers = Object.entries(told.numbers);
    const file = told.file;
    this.gallery = new Gallery(false);
    fill(
      el("header", {}, el("h1", {}, `Step ${this.step}`), el("span", {}, this.name)),
      this.links,
      file ? timeline(this.name, file) : el("p", {}, "This step's requests and completions were not kept: watch.groups was 0, or its file made room for newer ones."),
      this.gallery.node,
      el("section", {},
        told.account.length ? folded("Account of speculation", table(["of the whole run so far", "time"], told.account.map(row), { class: "pairs" }), true) : null,
        file ? folded("Requests and memory of each worker", table(["worker", "requests", "last token after", "memory of its process", "GPU memory reserved"], workerRows(file))) : null,
        folded("All numbers", table(["metric", "value"], numbers.map(([metric, value]) => row([metric, number(value)])), { class: "pairs" }))),
    );
    this.gallery.show(told.figures, kept.get(this.name).columns);
  }
}

function workerRows(file) {
  const gib = (bytes) => (bytes ? `${number(Number((bytes / 2 ** 30).toFixed(2)))} GiB` : "–");
  return file.memory.map(([worker, host, device]) => {
    const mine = file.requests.filter((one) => one[2] === worker);
    return row([`${worker}`, number(mine.length), mine.length ? `${number(Math.max(...mine.map((one) => one[5])))} s` : "–", gib(host), gib(device)]);
  });
}

function shapeColours(file) {
  const used = new Map();
  for (const [, spans] of file.shapes) for (const [, , shape] of spans) used.set(shape, (used.get(shape) || 0) + 1);
  const names = [...used.keys()].filter((name) => name !== "off").sort((a, b) => used.get(b) - used.get(a));
  const colours = new Map([["off", "c6"]]);
  names.forEach((name, index) => colours.set(name, ["c1", "c3", "c4", "c2", "c7", "c8"][index] || "c5"));
  return colours;
}

// One row for each request, on a canvas: thousands of rows are one node.
function timeline(name, file) {
  const rows = file.requests.map(([group, index, worker, submitted, first, finished]) => ({ group, index, worker, submitted, first, finished }));
  if (!rows.length) return el("p", {}, "No request is on record.");
  rows.sort((a, b) => a.worker - b.worker || b.finished - a.finished);
  const colours = shapeColours(file), spans = new Map(file.shapes), end = Math.max(...rows.map((one) => one.finished), 1e-6);
  const canvas = el("canvas", { tabindex: "0", role: "img" }), tip = el("div", { class: "tip", hidden: true }), spoken = el("div", { class: "spoken", "aria-live": "polite" });
  const ordered = rows.map((one) => one.finished).sort((a, b) => a - b), half = ordered[Math.floor(ordered.length / 2)];
  const tail = `Half of the requests are done after ${number(half)} s, the last after ${number(end)} s: in ${number(1 - half / end, true)} of the rollout fewer than half of them run.`;
  canvas.setAttribute("aria-label", `${rows.length} requests over time, one row each. ${tail} Arrow keys read single requests.`);
  let at = -1;
  const space = { left: 56, top: 8, bottom: 30, right: 12 };
  const draw = () => {
    const width = canvas.parentNode.clientWidth || 1000, height = Math.max(120, Math.min(560, rows.length * 6)) + space.top + space.bottom, ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    [canvas.width, canvas.height] = [width * ratio, height * ratio];
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    pen.scale(ratio, ratio);
    const room = width - space.left - space.right, each = (height - space.top - space.bottom) / rows.length;
    const x = (time) => space.left + (time / end) * room;
    const runs = new Map([...spans].map(([worker, list]) => [worker, shapeRuns(list, end, room)]));
    rows.forEach((one, index) => {
      const top = space.top + index * each, tall = Math.max(0.7, each - (each > 3 ? 1 : 0));
      pen.fillStyle = colour("grid");
      pen.fillRect(x(one.submitted), top, x(one.first) - x(one.submitted), tall);
      const list = runs.get(one.worker) || [];
      if (!list.length) { pen.fillStyle = colour("c6"); pen.fillRect(x(one.first), top, Math.max(0.7, x(one.finished) - x(one.first)), tall); }
      for (const [from, to, shape] of list) {
        const start = Math.max(from, one.first), stop = Math.min(to, one.finished);
        if (stop <= start) continue;
        pen.fillStyle = colour(colours.get(shape) || "c6");
        pen.fillRect(x(start), top, Math.max(0.5, x(stop) - x(start)), tall);
      }
    });
    pen.fillStyle = colour("soft");
    pen.font = "11.5px system-ui, sans-serif";
    pen.textAlign = "center";
    const times = ticks(0, end, Math.max(2, Math.min(8, Math.floor(room / 70)))).filter((time) => time <= end), say = tickWords(times);
    times.forEach((time) => pen.fillText(`${say(time)} s`, Math.min(width - 18, x(time)), height - 12));
    pen.strokeStyle = colour("ink");
    pen.setLineDash([4, 4]);
    pen.beginPath(); pen.moveTo(x(half), space.top); pen.lineTo(x(half), height - space.bottom); pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = colour("ink");
    pen.textAlign = "left";
    pen.fillText("half of the requests are done; the tail begins", x(half) + 6, height - space.bottom - 6);
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    const workers = [...new Set(rows.map((one) => one.worker))];
    workers.forEach((worker) => {
      const first = rows.findIndex((one) => one.worker === worker), many = rows.filter((one) => one.worker === worker).length;
      pen.fillText(workers.length > 1 ? `worker ${worker}` : `${rows.length}`, space.left - 6, space.top + (first + many / 2) * each + 4);
      if (first) { pen.strokeStyle = colour("base"); pen.beginPath(); pen.moveTo(space.left, space.top + first * each); pen.lineTo(width - space.right, space.top + first * each); pen.stroke(); }
    });
    if (at >= 0) { pen.strokeStyle = colour("ink"); pen.lineWidth = 1.5; pen.strokeRect(x(rows[at].submitted), space.top + at * each - 0.5, x(rows[at].finished) - x(rows[at].submitted), Math.max(2, each)); }
  };
  const show = (index, speak) => {
    if (index < 0 || index >= rows.length) { at = -1; tip.hidden = true; draw(); return; }
    at = index;
    const one = rows[index], words = [`group ${one.group}, completion ${one.index}`, `worker ${one.worker}`, `first token after ${number(one.first - one.submitted)} s`, `done at ${number(one.finished)} s`];
    const told = file.groups.find((group) => group.group === one.group);
    if (told) words.push(`${number(told.lengths[one.index])} tokens, reward ${number(told.rewards[one.index])}`);
    tip.replaceChildren(el("b", {}, words[0]), ...words.slice(1).map((text) => el("div", {}, el("span", {}, text))));
    tip.hidden = false;
    const part = (index + 0.5) / rows.length;
    tip.style.top = part > 0.6 ? "auto" : `${part * 80 + 5}%`;
    tip.style.bottom = part > 0.6 ? `${(1 - part) * 80 + 8}%` : "auto";
    tip.style.left = "70px";
    if (speak) spoken.textContent = words.join(", ");
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), part = (event.clientY - box.top - space.top) / (box.height - space.top - space.bottom);
    const index = part < 0 || part >= 1 ? -1 : Math.floor(part * rows.length);
    if (index !== at) show(index, false);
  });
  canvas.addEventListener("pointerleave", () => show(-1, false));
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(Math.min(rows.length - 1, Math.max(0, at + moves[event.key])), true);
  });
  canvas.addEventListener("click", () => {
    const one = rows[at];
    if (one && file.completions.some((completion) => completion.group === one.group)) location.hash = `#/run/${encodeURIComponent(name)}/step/${file.step}/completions/${one.group}/${one.index}`;
  });
  const left = file.requests_in_all - rows.length;
  const legend = el("ul", { class: "legend" }, ...[...colours].map(([shape, one]) => el("li", { class: one }, el("i"), el("b", {}, shape === "off" ? "plain" : shape))), el("li", { class: "waits" }, el("i"), el("b", {}, "waiting and prefill")));
  const node = el("figure", { class: "wide" }, el("figcaption", {}, el("h2", {}, "Requests"), el("p", {}, `A row for each request, from its submission to its last token, coloured by the shape that its worker's ticks had. ${tail}${left ? ` ${left} more requests are not shown.` : ""}`)), legend, el("div", { class: "plot" }, canvas, tip, spoken));
  new ResizeObserver(draw).observe(node);
  return node;
}

function shapeRuns(list, end, room) {
  // spans as [from, to, shape], those narrower than a place on the page merged with what is there
  const runs = [], least = end / Math.max(200, room);
  list.forEach(([from, , shape], index) => {
    const to = index + 1 < list.length ? list[index + 1][0] : end, last = runs[runs.length - 1];
    if (last && (last[2] === shape || to - last[0] < least)) last[1] = to;
    else runs.push([from, to, shape]);
  });
  return runs;
}

// ---- completions

class CompletionsView {
  constructor(name, step, group = null, index = null) {
    Object.assign(this, { name, step, wanted: group === null ? null : [Number(group), Number(index)], mode: "drafted" });
    stepTrail(name, step, [["completions", ["run", name, "step", step, "completions"]]]);
  }

  async poll() {
    const mine = shown, news = await readRun(this.name);
    if (mine !== shown) return;
    if (this.done) {
      if (news && this.links) renew(this.links, neighbours(this.name, this.step, ["completions"]));
      return;
    }
    const told = await readStep(this.name, this.step);
    if (mine !== shown) return;
    this.done = true;
    this.file = told.file;
    if (!this.file) {
      const others = kept.get(this.name).kept, other = others[others.length - 1];
      fill(el("h1", {}, `Completions of step ${this.step}`), el("p", {}, "They were not kept. ", other ? link(["run", this.name, "step", other, "completions"], `The newest that were: step ${other}.`) : "No step's were: watch.groups was 0."));
      return;
    }
    this.draw();
  }

  draw() {
    const { file } = this;
    const again = () => this.drawCards();
    this.search = el("input", { type: "search", placeholder: "text", oninput: again });
    this.low = el("input", { type: "number", step: "any", oninput: again, "aria-label": "lowest reward" });
    this.high = el("input", { type: "number", step: "any", oninput: again, "aria-label": "highest reward" });
    this.least = el("input", { type: "number", min: 0, oninput: again, "aria-label": "fewest tokens" });
    this.most = el("input", { type: "number", min: 0, oninput: again, "aria-label": "most tokens" });
    this.finish = el("select", { onchange: again }, el("option", { value: "" }, "any"), ...[...new Set(file.completions.map((one) => one.finish))].map((reason) => el("option", { value: reason }, reason)));
    const colours = el("select", { onchange: () => { this.mode = colours.value; legend.replaceChildren(tokenLegend(this.mode)); this.cards.querySelectorAll("details.completion").forEach((card) => card.colour(this.mode)); } }, ...TOKEN_COLOURS.map(([mode, words]) => el("option", { value: mode }, words)));
    const legend = el("div", {}, tokenLegend(this.mode));
    this.count = el("p", { class: "hint", "aria-live": "polite" });
    this.cards = el("div", { class: "cards" });
    this.texts = file.completions.map((one) => one.texts.join(""));
    fill(
      el("header", {}, el("h1", {}, `Completions of step ${this.step}`), el("span", {}, this.name)),
      this.links = el("div", {}, neighbours(this.name, this.step, ["completions"])),
      this.groups(),
      el("div", { class: "toolbar", role: "search" }, el("label", {}, "Find ", this.search), el("span", {}, "Reward ", this.low, " to ", this.high), el("span", {}, "Tokens ", this.least, " to ", this.most), el("label", {}, "Ended by ", this.finish), el("label", {}, "Colour tokens by ", colours)),
      legend, this.count, this.cards,
    );
    this.drawCards();
    if (this.wanted) this.cards.querySelector("details[open]")?.scrollIntoView();
  }

  groups() {
    // rewards of every group; those without any spread teach nothing
    const { file } = this, texts = new Set(file.completions.map((one) => one.group));
    const flat = file.groups.filter((group) => Math.max(...group.rewards) === Math.min(...group.rewards));
    const all = file.groups.flatMap((group) => group.rewards), low = Math.min(...all), high = Math.max(...all);
    const rows = file.groups.map((group) => {
      const same = flat.includes(group), mean = group.rewards.reduce((a, b) => a + b, 0) / group.rewards.length;
      const dots = el("span", { class: "dots", "aria-hidden": "true" }, ...group.rewards.slice(0, 32).map((reward) => el("i", { class: `r${high > low ? Math.round((4 * (reward - low)) / (high - low)) : 0}`, title: number(reward) })));
      const named = texts.has(group.group) ? el("a", { href: `#/run/${encodeURIComponent(this.name)}/step/${this.step}/completions/${group.group}/0` }, `${group.group}`) : `${group.group}`;
      return el("tr", { class: same ? "flat" : null }, el("th", { scope: "row" }, named), el("td", {}, el("code", {}, group.prompt)), el("td", {}, dots), el("td", {}, fixed(mean, 3)), el("td", {}, same ? "none" : "yes"), el("td", {}, number(Math.max(...group.lengths))));
    });
    const words = `${file.groups_in_all} groups, ${flat.length} of those shown without signal: all their rewards are the same, so that they teach nothing. Completions are kept of the groups with a link.`;
    return folded("Groups", el("div", {}, el("p", { class: "hint" }, words), el("div", { class: "scroll tall" }, table(["group", "prompt", "rewards", "mean", "signal", "longest"], rows))), true);
  }

  drawCards() {
    const words = this.search.value.toLowerCase(), limit = (field, otherwise) => (field.value === "" ? otherwise : Number(field.value));
    const found = this.file.completions.filter((one, index) => (!words || this.texts[index].toLowerCase().includes(words))
      && limit(this.low, -Infinity) <= one.reward && one.reward <= limit(this.high, Infinity)
      && limit(this.least, 0) <= one.tokens && one.tokens <= limit(this.most, Infinity)
      && (!this.finish.value || one.finish === this.finish.value));
    this.count.textContent = `${found.length} of ${this.file.completions.length} completions.${found.length > MOST_CARDS ? ` The first ${MOST_CARDS} are shown: narrow the search for others.` : ""}`;
    const cards = [];
    let group = null;
    for (const one of found.slice(0, MOST_CARDS)) {
      if (one.group !== group) {
        group = one.group;
        const first = this.file.completions.find((other) => other.group === group && other.question);
        if (first) cards.push(el("div", { class: "question" }, el("b", {}, `Group ${group}`), el("p", {}, first.question), first.reference ? el("p", { class: "hint" }, `Reference: ${first.reference}`) : null));
      }
      const wanted = this.wanted && this.wanted[0] === one.group && this.wanted[1] === one.index;
      cards.push(completionView(one, this.mode, wanted || (!this.wanted && cards.length < 2)));
    }
    this.cards.replaceChildren(...cards);
  }
}

// ---- the drafter

class DrafterView {
  constructor(name) {
    this.name = name;
    where([name, ["run", name]], ["drafter", ["run", name, "drafter"]]);
    this.gallery = new Gallery();
    this.body = el("div");
    fill(el("header", {}, el("h1", {}, "Drafter"), el("span", {}, name)), this.body, this.gallery.node);
  }

  async poll() {
    const mine = shown, news = await readRun(this.name);
    if (mine !== shown || (!news && this.drawn)) return;
    this.drawn = true;
    const run = kept.get(this.name), { drafter } = run;
    const kind = { none: "This run decodes plainly: spec.drafter is none.", suffix: "Drafts come from earlier text: nothing is trained." }[drafter.drafter] || `Drafters: ${drafter.drafter}${drafter.frozen ? ", not trained in this run" : ""}.`;
    const rows = drafter.trained.slice().reverse().map((one) => row([one.step, one.version, one.drafts_from ?? "–", one.micro_steps, number(one.tokens), `${fixed(one.loss_before, 3)} → ${fixed(one.loss_after, 3)}`, `${fixed(one.accept_before, 2)} → ${fixed(one.accept_after, 2)}`, `${fixed(one.seconds, 2)} s`, one.reason]));
    renew(
      this.body,
      el("p", { class: "words" }, kind, drafter.drafted ? "" : " No draft was verified so far."),
      el("h2", {}, "Whether training pays"),
      drafter.said.length ? el("ul", {}, ...drafter.said.map(([step, words]) => el("li", {}, words.startsWith("step") ? words : `step ${step}: ${words}`))) : el("p", { class: "hint" }, "Nothing was said about it."),
      el("h2", {}, "Trained versions"),
      rows.length ? el("div", { class: "scroll tall" }, table(["step", "version", "drafts from step", "micro-steps", "tokens", "loss", "accept length", "took", "why it was trained, and why it stopped"], rows)) : el("p", { class: "hint" }, "It was not trained so far."),
    );
    this.gallery.show(run.figures.filter((figure) => figure.topic === "Speculation").map((figure) => ({ ...figure, topic: "" })), run.columns);
  }
}

// ---- the address

function viewOf(address) {
  const [kind, name, what, step, more, ...rest] = address;
  if (kind === "run" && name && what === undefined) return new RunView(name);
  if (kind === "run" && what === "drafter") return new DrafterView(name);
  if (kind === "run" && what === "step" && more === "completions") return new CompletionsView(name, Number(step), ...rest);
  if (kind === "run" && what === "step") return new StepView(name, Number(step));
  return new RunsView(kind === "compare" ? address.slice(1) : []);
}

async function guarded(work) {
  try {
    await work();
    trouble.hidden = true;
  } catch (error) {
    trouble.textContent = error instanceof TypeError && LIVE ? `The server does not answer (${error.message}). Is \`tlt watch\` still running?` : error.message;
    trouble.hidden = false;
  }
}

async function route() {
  shown += 1;
  let address;
  try {
    address = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    address = [];
  }
  view = viewOf(address);
  await guarded(() => view.poll());
  document.body.dataset.ready = String(shown);
}

async function beat() {
  const mine = view;
  if (LIVE && mine && document.visibilityState === "visible") await guarded(() => (mine === view ? mine.poll() : null));
  setTimeout(beat, POLL_MS);
}

window.addEventListener("beforeprint", () => view?.gallery?.drawAll());
window.addEventListener("hashchange", (event) => {
  if (new URL(event.newURL).hash === "#main") return;
  main.focus({ preventScroll: true }); // before anything is read: by then somebody may have gone on with Tab
  window.scrollTo(0, 0);
  route();
});
route().then(() => setTimeout(beat, POLL_MS));
