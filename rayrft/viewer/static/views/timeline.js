// Timeline: who was busy when, drawn on a canvas, and what the steps waited for.

import { make } from "../base.js";
import { colour, css, duration, field, input, listing, number, percent, soft } from "../draw.js";
import { change, link, pick, query } from "../page.js";

const [TITLE, BAR, GAP, PAD] = [15, 20, 9, 1]; // pixels of a lane
const IDLE = new Set(["wait", "lease", "admission"]); // nobody works
const FIXED = { rollout: 0, generate: 0, train: 1, reward: 3, score: 3, sync: 2, send: 2, receive: 2, operators: 4, store: 5 };

const seconds = (value) => (value < 0.001 ? `${number(1e6 * value)} µs` : value < 1 ? `${number(1e3 * value)} ms` : value < 100 ? `${number(value)} s` : duration(value));

const palette = () => {
  const known = new Map();
  return (name) => {
    if (IDLE.has(name)) return css("--line");
    if (!known.has(name)) known.set(name, FIXED[name] ?? 5 + (known.size % 3));
    return colour(known.get(name));
  };
};

const piece = (name, took, of) => {
  const part = make("span", { title: `${name}: ${seconds(took)}` });
  part.style.flexGrow = took;
  part.style.background = of(name);
  return part;
};
const swatch = (name, of, more = "") => {
  const sample = make("i", {});
  sample.style.background = of(name);
  return make("span", {}, sample, `${name}${more}`);
};

// The time that the chosen steps took, by what they waited for or did.
const totals = (found, of) => {
  const sums = new Map();
  for (const { parts } of found.critical) for (const [name, start, end] of parts) sums.set(name, (sums.get(name) ?? 0) + end - start);
  const total = [...sums.values()].reduce((sum, each) => sum + each, 0);
  const entries = [...sums].sort(([, a], [, b]) => b - a).filter(([, each]) => each / total > 0.002);
  const bar = make("div", { className: "bar-parts tall", role: "img", "aria-label": entries.map(([name, each]) => `${name} ${percent(each / total)}`).join(", ") });
  const legend = make("div", { className: "legend" });
  for (const [name, each] of entries) {
    bar.append(piece(name, each, of));
    legend.append(swatch(name, of, ` ${percent(each / total)}`));
  }
  return [bar, legend];
};

const critical = (found, run, of) => {
  const lines = found.steps.map(({ step }, at) => {
    const { group, parts } = found.critical[at];
    const waited = parts.filter(([name]) => !["train", "sync"].includes(name));
    const longest = waited.reduce((a, b) => (b[2] - b[1] > a[2] - a[1] ? b : a), waited[0] ?? ["", 0, 0]);
    const all = parts.reduce((sum, [, start, end]) => sum + end - start, 0);
    const bar = make("div", { className: "bar-parts" });
    bar.append(...parts.map(([name, start, end]) => piece(name, end - start, of)));
    const rows = link({ view: "experiences", run, min_step: step, max_step: step }, number(step));
    const what = longest[0] ? `${longest[0]} ${seconds(longest[2] - longest[1])}` : "–";
    return make("tr", {}, make("td", { className: "num" }, rows), make("td", { className: "num", textContent: seconds(all) }), make("td", { className: "wide" }, bar), make("td", { className: "num", textContent: what }), make("td", { className: "what" }, group ? link({ view: "experiences", run, group_id: group }, group) : soft("no group")));
  });
  return listing(["step", "took", "what its time went to", "longest wait", "group it waited for"], lines);
};

const drawing = (found, of) => {
  const canvas = make("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Lanes of ${found.lanes.map(({ lane }) => lane).join(", ")}`);
  const readout = make("span", { className: "readout" });
  const band = found.steps.flatMap(({ step, parts }) => parts.map(([name, start, end]) => [start, end, name, 1, `step ${step}`]));
  const path = found.critical.flatMap(({ group, parts }) => parts.map(([name, start, end]) => [start, end, name, 1, group]));
  const lanes = [{ lane: "steps", spans: band }, { lane: "critical path", spans: path }, ...found.lanes];
  const height = lanes.length * (TITLE + BAR + GAP);
  const span = found.end - found.start || 1;
  let selected = null;

  const at = (x) => found.start + (x / (canvas.clientWidth || 1)) * span;
  const draw = () => {
    const [ratio, width] = [devicePixelRatio, canvas.clientWidth];
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui";
    const place = (time) => ((time - found.start) / span) * width;
    lanes.forEach(({ lane, spans }, row) => {
      const top = row * (TITLE + BAR + GAP);
      ctx.fillStyle = css("--soft");
      ctx.fillText(lane, 2, top + 11);
      ctx.fillStyle = css("--hover");
      ctx.fillRect(0, top + TITLE, width, BAR);
      const most = spans.reduce((max, [, , , load]) => Math.max(max, load), 1);
      for (const [start, end, name, load] of spans) {
        const [left, right] = [Math.max(place(start), 0), Math.min(place(end), width)];
        const tall = Math.max((BAR - 2 * PAD) * Math.min(load / most, 1), 2);
        ctx.fillStyle = of(name);
        ctx.fillRect(left, top + TITLE + BAR - PAD - tall, Math.max(right - left - (right - left > 3 ? 0.5 : 0), 0.75), tall);
      }
    });
    ctx.strokeStyle = css("--soft");
    ctx.globalAlpha = 0.35;
    for (const { parts } of found.steps) {
      const x = Math.round(place(parts[0][1])) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, 0);
      ctx.lineTo(x, height);
      ctx.stroke();
    }
    if (selected) {
      ctx.globalAlpha = 0.2;
      ctx.fillStyle = css("--accent");
      ctx.fillRect(Math.min(...selected), 0, Math.abs(selected[1] - selected[0]), height);
    }
  };
  const tell = ({ offsetX, offsetY }) => {
    const lane = lanes[Math.floor(offsetY / (TITLE + BAR + GAP))];
    const time = at(offsetX);
    const near = span / (canvas.clientWidth || 1);
    const there = (lane?.spans ?? []).filter(([start, end]) => start - near <= time && time <= end + near);
    const text = there.slice(0, 3).map(([start, end, name, load, who]) => `${name} ${seconds(end - start)}${load > 1.05 ? `, ${number(load)} at once` : ""}${who ? ` (${who})` : ""}`);
    readout.textContent = lane ? [`+${seconds(time - found.start)}`, lane.lane, ...text].join(" · ") : "";
  };
  canvas.style.height = `${height}px`;
  canvas.onpointerdown = (event) => {
    selected = [event.offsetX, event.offsetX];
    canvas.setPointerCapture(event.pointerId);
  };
  canvas.onpointermove = (event) => {
    tell(event);
    if (!selected) return;
    selected[1] = event.offsetX;
    draw();
  };
  canvas.onpointerup = () => {
    const [from, to] = [...selected].sort((a, b) => a - b);
    selected = null;
    if (to - from > 4) change({ start: at(from), end: at(to), first: "", last: "" });
    else draw();
  };
  canvas.ondblclick = () => change({ start: "", end: "" });
  new ResizeObserver(draw).observe(canvas);
  const names = new Set(found.lanes.flatMap((lane) => Object.keys(lane.names)));
  const head = make("figcaption", {}, make("b", { textContent: seconds(span) }), readout);
  return make("figure", { className: "panel timeline" }, head, canvas, make("div", { className: "legend" }, ...[...names].map((name) => swatch(name, of))));
};

const controls = (found) => {
  const count = found.last - found.first + 1;
  const width = found.end - found.start;
  const steps = (first) => change({ first: Math.max(first, 0), last: Math.max(first, 0) + count - 1, start: "", end: "" });
  const zoom = (by) => change({ start: found.start + (width * (1 - by)) / 2, end: found.end - (width * (1 - by)) / 2, first: "", last: "" });
  const button = (name, label, onclick, disabled = false) => make("button", { type: "button", textContent: name, "aria-label": label, title: label, onclick, disabled });
  const number_ = (name) => field(`${name} step`, input(`${name} step`, found[name], (value) => change({ [name]: value, start: "", end: "" }), { type: "number", min: 0, step: 1 }));
  return make(
    "div",
    { className: "controls" },
    number_("first"),
    number_("last"),
    button("←", "Steps before", () => steps(found.first - count), found.first <= 0),
    button("→", "Steps after", () => steps(found.first + count), found.last >= found.newest),
    button("+", "Zoom in", () => zoom(0.5)),
    button("−", "Zoom out", () => zoom(2)),
    button("Latest", "The latest steps", () => change({ first: "", last: "", start: "", end: "" })),
    soft("Drag to zoom, double-click to zoom out. A bar is as high as its load. rayrft trace writes this for Perfetto."),
  );
};

const busy = (found) => {
  const width = found.end - found.start || 1;
  const lines = found.lanes.flatMap(({ lane, names }) =>
    Object.entries(names).map(([name, { seconds: took, load }]) =>
      make("tr", {}, make("td", { textContent: lane }), make("td", { textContent: name }), make("td", { className: "num", textContent: percent(Math.min(took / width, 1)) }), make("td", { className: "num", textContent: seconds(took) }), make("td", { className: "num what", textContent: number(load) })),
    ),
  );
  return listing(["lane", "activity", "of the time", "seconds", "at once, in the mean"], lines);
};

export const draw = async (now, main, current) => {
  const found = await query("timeline", { run: now.run, ...pick(now, ["first", "last", "start", "end"]) });
  if (!current()) return;
  const of = palette();
  const nothing = found.traced ? "Nothing was recorded in this time." : "The run writes no traces: monitor.trace is false, or another release wrote it.";
  const wasOpen = main.querySelector("details.busy")?.open ?? false;
  const joined = found.joined ? [make("p", { className: "notice", textContent: `Spans that are less than ${seconds(found.joined)} apart are joined; zoom in to see them.` })] : [];
  main.replaceChildren(
    controls(found),
    ...(found.steps.length ? totals(found, of) : []),
    ...joined,
    ...(found.lanes.length || found.steps.length ? [drawing(found, of)] : [make("p", { className: "empty", textContent: nothing })]),
    ...(found.steps.length ? [critical(found, now.run, of)] : []),
    make("details", { className: "busy", open: wasOpen }, make("summary", { textContent: "Lanes as numbers" }), busy(found)),
  );
};
