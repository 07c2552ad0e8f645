// What the views draw: curves with uPlot, sparklines, and the small parts of a page.

import { make } from "./base.js";
import { link } from "./page.js";

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
export const AXES = ["step", "samples", "tokens", "hours"].map((each) => [each, each]);
export const colour = (at) => css(COLOURS[at % COLOURS.length]);

// Numbers

export const number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e7)) return value.toExponential(1);
  return value.toLocaleString("en", { maximumSignificantDigits: size >= 1 ? Math.max(digits, 4) : digits });
};
export const short = (value) =>
  value >= 1e6 ? `${number(value / 1e6, 3)}M` : value >= 1e4 ? `${number(value / 1e3, 3)}k` : number(value);
export const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`);
export const ago = (seconds) => {
  const passed = Date.now() / 1000 - seconds;
  const [unit, size] = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].find(([, each]) => passed >= each) ?? ["s", 1];
  return `${Math.max(0, Math.floor(passed / size))} ${unit} ago`;
};
export const duration = (seconds) =>
  seconds >= 3600 ? `${(seconds / 3600).toFixed(1)} h` : seconds >= 60 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds)} s`;

// Parts

export const pill = (text, kind = "") => make("span", { className: `pill ${kind}`, textContent: text });
export const STATUS = { running: "good", finished: "calm", failed: "bad", killed: "bad", stopped: "warn", silent: "warn" };
export const select = (label, value, options, onchange) => {
  const chosen = make("select", { onchange: () => onchange(chosen.value), "aria-label": label });
  for (const [key, name] of options) {
    chosen.append(make("option", { value: key, textContent: name, selected: String(key) === String(value) }));
  }
  return field(label, chosen);
};

export const metric = (label, value, ...more) => {
  const parts = [make("span", { className: "soft", textContent: label }), make("b", {}, value)];
  return make("div", { className: "metric" }, ...parts, ...more);
};
export const soft = (textContent) => make("span", { className: "soft", textContent });

// A run at a glance: a line that names it, numbers, and what is wrong with it.
export const summary = (run, title, ...metrics) =>
  make(
    "article",
    { className: "run" },
    make("div", { className: "title" }, ...title, pill(run.status, STATUS[run.status]), soft(ago(run.changed))),
    make("div", { className: "facts" }, ...metrics, ledger(run)),
    ...[run.error, ...run.problems].filter(Boolean).map((text) => make("p", { className: "problem", textContent: text })),
    ...(run.verdict ? [make("p", { className: "verdict", textContent: run.verdict })] : []),
  );
export const steps = (run) => (run.steps_planned ? `${number(run.step)} / ${number(run.steps_planned)}` : number(run.step));

// An input that gives its value when the person has left it.
export const input = (label, value, onchange, more = {}) => {
  const made = make("input", { ...more, value, defaultValue: value, "aria-label": label, onchange: () => onchange(made.value.trim()) });
  return made;
};
export const field = (label, ...inputs) => make("label", { className: "field" }, make("span", { textContent: label }), ...inputs);
export const smoothing = (value, onchange) =>
  field("smoothing", input("smoothing", value, onchange, { type: "range", min: 0, max: 0.98, step: 0.02 }));

// The address of the rows of a point, which is the mean of `count` steps, and of the answers of an evaluation.
export const rowsAt = (run, means, at, count) => {
  const half = (count - 1) / 2; // the last point may be of fewer steps
  const first = Math.round(Math.max(means[at] - half, (means[at - 1] ?? -Infinity) + half + 1));
  return { view: "experiences", run, min_step: first, max_step: Math.round(2 * means[at]) - first };
};
export const answersOf = (run, version) => ({ view: "experiences", run, group_status: "evaluation", min_version: version, max_version: version });

// A table with its heads, whose last column takes the room if it is long, and the pages around it.
export const listing = (heads, lines) => {
  const last = lines[0]?.lastChild.classList.contains("what") ? "what" : "";
  const head = make("thead", {}, make("tr", {}, ...heads.map((textContent, at) => make("th", { textContent, className: at === heads.length - 1 ? last : "" }))));
  return make("div", { className: "scroll" }, make("table", { className: "rows" }, head, make("tbody", {}, ...lines)));
};
export const pages = (what, first, shown, total, size, turn) => {
  const button = (to, textContent) => make("button", { type: "button", textContent, disabled: to <= -size || to >= total, onclick: () => turn(Math.max(to, 0) || "") });
  const about = total ? `${number(first + 1)}–${number(first + shown)} of ${number(total)} ${what}` : `No such ${what.slice(0, -1)}.`;
  return make("div", { className: "row pages" }, button(first - size, "Back"), soft(about), button(first + size, "More"));
};

const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};

// A small curve of values, or of [x, y] points, between `low` and `high`.
export const sparkline = (values, { low = null, high = null, dots = false } = {}) => {
  const points = values.map((each, at) => (Array.isArray(each) ? each : [at, each])).filter(([, y]) => y !== null);
  const drawing = svg("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", "aria-hidden": "true" });
  if (!points.length) return drawing;
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const [bottom, top] = [Math.min(low ?? Infinity, ...ys), Math.max(high ?? -Infinity, ...ys)];
  const at = ([x, y]) => [right > left ? (100 * (x - left)) / (right - left) : 50, 26 - (24 * (y - bottom)) / (top - bottom || 1)];
  const line = points.map(at).map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  drawing.append(svg("polyline", { points: line, "vector-effect": "non-scaling-stroke" }));
  if (dots || points.length === 1) {
    const [x, y] = at(points.at(-1));
    drawing.append(svg("line", { x1: x, y1: y, x2: x, y2: y, "vector-effect": "non-scaling-stroke", class: "dot" }));
  }
  return drawing;
};

// The ledger of a run as one bar: trained, dropped by reason, held. Each part leads to its rows.
const ledger = ({ run, ledger: of }) => {
  if (!of) return soft("no rows read yet");
  const parts = [["trained", of.trained, "good", { group_status: "trained" }], ...Object.entries(of.dropped).map(([why, rows]) => [why, rows, "drop", { drop_reason: why }])];
  parts.push(["held", of.held, "calm", { where: "group_status in ('ready', 'leased', 'parked')" }]);
  const bar = make("div", { className: "bar-parts" });
  const there = parts.filter(([, rows]) => rows);
  for (const [name, rows, kind, filter] of there) {
    const part = link({ view: "experiences", run, ...filter });
    Object.assign(part, { className: kind, title: `${name}: ${number(rows)} rows`, ariaLabel: `${name} ${rows}` });
    part.style.flexGrow = rows;
    bar.append(part);
  }
  const dropped = Object.values(of.dropped).reduce((sum, rows) => sum + rows, 0);
  const line = `${short(of.sampled)} sampled = ${short(of.trained)} trained + ${short(dropped)} dropped + ${short(of.held)} held`;
  return make("div", { className: "ledger" }, bar, make("p", { className: "soft", textContent: line, title: there.map(([name, rows]) => `${name} ${number(rows)}`).join("\n") }));
};

export const smoothed = (values, weight) => {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
};

// Whether most of the values have no neighbour, so that a line would not show them.
const isSparse = (values) => {
  const known = [false, ...values.filter((each) => each !== undefined).map((each) => each !== null), false];
  return 2 * known.filter((each, at) => each && !known[at - 1] && !known[at + 1]).length > known.filter(Boolean).length;
};

// A chart. `series` are { name, y, colour, kind: line | raw | points | area }, `bands` pairs of series by number, `marks`
// are { x, kind, text }. A click gives the number of the nearest point to `onpick`, and its series.
export const chart = (title, x, series, { marks = [], bands = [], height = 190, onpick, sync, xname = "step", yrange } = {}) => {
  const readout = make("span", { className: "readout" });
  const plotted = make("div", { className: "plot" });
  const legend = make("div", { className: "legend" });
  const panel = make("figure", { className: "panel" }, make("figcaption", {}, make("b", { textContent: title }), readout), plotted, legend);
  series = series.map((each) => ({ ...each, kind: each.kind ?? (isSparse(each.y) ? "points" : "line") }));
  const named = series.filter(({ kind }) => kind !== "raw" && kind !== "edge");
  for (const { name, colour: at } of named.length > 1 ? named : []) {
    const swatch = make("i", {});
    swatch.style.background = colour(at);
    legend.append(make("span", {}, swatch, name));
  }
  const [ink, line, warn] = [css("--soft"), css("--line"), css("--warn")];
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui" };
  const drawMarks = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of marks) {
      const at = Math.round(plot.valToPos(mark.x, "x", true));
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = { restart: css("--bad"), change: css("--accent"), stage: ink }[mark.kind] ?? warn;
      ctx.setLineDash(mark.kind === "checkpoint" ? [] : [3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(at, mark.kind === "checkpoint" ? bbox.top + bbox.height - 6 * devicePixelRatio : bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      if (mark.kind === "stage") {
        ctx.fillStyle = ink;
        ctx.font = `${10 * devicePixelRatio}px system-ui`;
        ctx.textAlign = "left"; // it is that of the axes
        ctx.fillText(mark.text, at + 3 * devicePixelRatio, bbox.top + 9 * devicePixelRatio);
      }
    }
    ctx.restore();
  };
  const tell = (plot) => {
    const at = plot.cursor.idx;
    readout.textContent =
      at === null || at === undefined
        ? ""
        : [`${xname} ${number(x[at])}`, ...named.filter(({ y }) => (y[at] ?? null) !== null).map(({ name, y, own }) => `${named.length > 1 ? `${name} ` : ""}${number((own ?? y)[at])}`)].join(" · ");
  };
  const lines = series.map(({ kind, colour: at }) => ({
    stroke: kind === "raw" || kind === "edge" ? "transparent" : colour(at),
    width: 1.75,
    fill: kind === "area" ? `${colour(at)}66` : undefined,
    points: { raw: { show: true, size: 4, stroke: "transparent", fill: `${colour(at)}99` }, points: { show: true, size: 6, fill: colour(at) } }[kind] ?? { show: false },
    spanGaps: kind === "points",
  }));
  const options = {
    width: 300,
    height,
    legend: { show: false },
    cursor: { sync: sync ? { key: sync } : undefined, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: yrange ? { range: yrange } : {} },
    axes: [{ ...axis, space: 60, size: 28 }, { ...axis, size: 52, values: (_, ticks) => ticks.map((each) => short(each)) }],
    series: [{}, ...lines],
    bands: bands.map(([high, low, at, alpha = "22"]) => ({ series: [high + 1, low + 1], fill: `${colour(at)}${alpha}` })),
    hooks: { draw: [drawMarks], setCursor: [tell] },
  };
  const plot = new uPlot(options, [x, ...series.map(({ y }) => y)], plotted);
  new ResizeObserver(() => plotted.clientWidth && plot.setSize({ width: plotted.clientWidth, height })).observe(plotted);
  if (onpick) {
    plot.over.classList.add("pick");
    let from = 0;
    plot.over.addEventListener("mousedown", (event) => (from = event.clientX));
    plot.over.addEventListener("click", (event) => {
      const at = plot.cursor.idx;
      if (Math.abs(event.clientX - from) >= 3 || at === null || at === undefined) return;
      const distance = ({ y }) => Math.abs(plot.valToPos(y[at], "y") - plot.cursor.top);
      const there = series.filter(({ y }) => (y[at] ?? null) !== null);
      if (there.length) onpick(at, there.reduce((a, b) => (distance(b) < distance(a) ? b : a)));
    });
  }
  return panel;
};
