// One run: its curves by group, with what happened as marks. A click at a step opens its rows.

import { make } from "../base.js";
import { answersOf, AXES, chart, duration, metric, number, pill, rowsAt, select, smoothed, smoothing, soft, steps, summary } from "../draw.js";
import { changeHere, go, link, query } from "../page.js";

// A chart: title, fields with their names, and how it is drawn.
const CHARTS = [
  ["Reward", { reward: "reward of sampled answers" }],
  ["Accuracy, held out", "accuracy"],
  ["Loss parts", { policy_loss: "policy", sft_loss: "SFT", preference_loss: "preference", distillation_loss: "distillation", value_loss: "value" }],
  ["KL to the reference", { kl: "KL", reference_kl: "reference KL" }],
  ["Entropy", { entropy: "entropy" }],
  ["Clipped tokens", { clip_fraction: "share" }],
  ["Staleness, steps", { staleness_mean: "mean", staleness_max: "max" }],
  ["Log-prob gap, engine to trainer", { logprob_gap: "fresh batch", probe_gap: "probe" }],
  ["Answer length, tokens", "length"],
  ["Truncated answers", { truncated_share: "share" }],
  ["Tokens per second", { tokens_per_s: "tokens/s" }],
  ["Seconds of a step", "time"],
  ["Gradient norm", { grad_norm: "policy", value_grad_norm: "value" }],
  ["Rows dropped", "lost"],
];
const KINDS = { restart: "bad", change: "accent", evaluation: "calm" };

// Fields that say nothing in a step without such rows, in which they are 0.
const OF_USUAL = ["policy_loss", "kl", "entropy", "clip_fraction", "logprob_gap", "ratio"];
const OF_EXPERT = ["sft_loss", "preference_loss", "reference_kl"];

const has = (values) => values?.some((each) => each !== null && each !== 0);

const field = (columns, name) => {
  const rows = OF_USUAL.includes(name) ? columns.usual_rows : OF_EXPERT.includes(name) ? columns.expert_rows : null;
  return rows ? columns[name]?.map((each, at) => (rows[at] ? each : null)) : columns[name];
};

const series = (kind, columns) => {
  if (kind === "length") {
    const rows = columns.sampled_rows ?? [];
    const mean = rows.map((each, at) => (each ? columns.sampled_tokens[at] / each : null));
    return [["tokens of an answer", mean]];
  }
  if (kind === "lost") return Object.entries(columns).filter(([name]) => name.startsWith("lost: ")).map(([name, y]) => [name.slice(6), y]);
  return Object.entries(kind).map(([name, label]) => [label, field(columns, name)]).filter(([, y]) => has(y));
};

const timeChart = (columns, x, options) => {
  const parts = [["train", columns.train_s], ["wait", columns.wait_s], ["sync", columns.sync_s]].filter(([, y]) => has(y));
  if (!parts.length) return null;
  const sums = [];
  parts.forEach(([, y], at) => sums.push(y.map((each, step) => (each ?? 0) + (at ? sums[at - 1][step] : 0))));
  const stacked = parts.map(([name, y], at) => ({ name, y: sums[at], colour: at, kind: at ? "line" : "area", own: y })).reverse();
  const bands = stacked.slice(1).map((_, at) => [at, at + 1, stacked[at].colour, "66"]);
  return chart("Seconds of a step, stacked", x, stacked, { ...options, bands, yrange: (_, low, high) => [0, high * 1.05] });
};

const accuracyChart = (found, options) => {
  const { evaluations, columns } = found;
  if (!evaluations.length) return null;
  const axis = options.xname;
  const at = new Map(columns.step.map((step, place) => [step, columns[axis][place]]));
  const where = (each) => (axis === "step" ? each.step : (at.get(each.step) ?? 0));
  const xs = [...new Set(evaluations.map(where))].sort((a, b) => a - b);
  const names = [...new Set(evaluations.map((each) => each.temperature ?? "pairs"))];
  const lines = [];
  const bands = [];
  names.forEach((name, place) => {
    const by = new Map(evaluations.filter((each) => (each.temperature ?? "pairs") === name).map((each) => [where(each), each]));
    const y = (field) => xs.map((x) => by.get(x)?.[field]);
    const label = name === "pairs" ? "held-out pairs" : name === 0 ? "greedy" : `temperature ${name}`;
    bands.push([lines.length + 1, lines.length + 2, place]);
    lines.push({ name: label, y: y("accuracy"), colour: place, kind: "points" });
    lines.push({ name: "", y: y("high"), colour: place, kind: "edge" }, { name: "", y: y("low"), colour: place, kind: "edge" });
  });
  const onpick = (place) => {
    const measured = evaluations.find((each) => where(each) === xs[place] && "version" in each); // pairs have no answers
    if (measured) go(answersOf(found.run, measured.version));
  };
  return chart("Accuracy, held out, with 95 % interval", xs, lines, { ...options, bands, onpick, sync: undefined });
};

const head = (run) => {
  const gap = run.widest_gap;
  const place = run.stages.length > 1 ? `${run.stages.indexOf(run.stage) + 1} of ${run.stages.length}` : "";
  return summary(
    run,
    [make("h1", { textContent: run.run })],
    metric("step", steps(run)),
    metric("stage", run.stage || "–", soft(place)),
    metric("weights", `v${run.version}`),
    metric("time", run.seconds ? duration(run.seconds) : "–"),
    ...(gap ? [metric("widest gap", number(gap.mean), link({ view: "experiences", run: run.run, id: gap.row, colour: "trainer" }, `step ${gap.step}`))] : []),
  );
};

const events = (run) => {
  const told = run.marks.filter(({ kind }) => kind !== "checkpoint");
  const lines = told.map((mark) =>
    make(
      "tr",
      {},
      make("td", {}, link({ view: "experiences", run: run.run, min_step: mark.step, max_step: mark.step }, String(mark.step))),
      make("td", { className: "num" }, pill(mark.kind, KINDS[mark.kind]), mark.stage ? ` ${mark.stage}` : ""),
      make("td", { textContent: mark.text }),
    ),
  );
  const table = make("table", {}, make("tr", {}, ...["step", "event", ""].map((name) => make("th", { textContent: name }))), ...lines);
  return make("details", { className: "panel events", open: told.length < 12 }, make("summary", { textContent: `Events (${told.length})` }), table);
};

// Stages begin, parts restart, keys change, checkpoints are written: with the value of the axis at their step.
const marksOf = (run, axis) => {
  const { columns } = run;
  const at = (step) => {
    const place = columns.step.findIndex((each) => each >= step);
    return axis === "step" || place < 0 ? step : columns[axis][place];
  };
  const kindOf = ({ kind, text }) => (kind !== "note" ? kind : text.startsWith("stage '") ? "stage" : null);
  return run.marks
    .map((mark) => ({ ...mark, kind: kindOf(mark), x: at(mark.step) }))
    .filter(({ kind }) => kind)
    .map((mark) => ({ ...mark, text: mark.kind === "stage" ? mark.stage : mark.text }));
};

export const draw = async (now, main, current) => {
  const run = await query("run", { run: now.run });
  if (!current()) return;
  const axis = now.axis ?? "step";
  const weight = Number(now.smooth ?? 0);
  const starts = [...run.stage_starts, ["", Infinity]];
  const at = starts.findIndex(([name]) => name && name === now.stage);
  const within = at < 0 ? () => true : (step) => step >= starts[at][1] && step < starts[at + 1][1];
  const kept = (run.columns.step ?? []).map(within);
  const columns = Object.fromEntries(Object.entries(run.columns).map(([name, y]) => [name, y.filter((_, place) => kept[place])]));
  run.columns = columns;
  run.evaluations = run.evaluations.filter(({ step }) => at < 0 || within(step) || step === starts[at][1] - 1);
  const x = columns[axis] ?? [];
  const onpick = (at) => go(rowsAt(now.run, columns.step, at, run.mean_of));
  const options = { marks: marksOf(run, axis), sync: "steps", xname: axis, onpick };
  const charts = CHARTS.map(([title, kind]) => {
    if (kind === "accuracy") return accuracyChart(run, options);
    if (!x.length) return null;
    if (kind === "time") return timeChart(columns, x, options);
    const lines = series(kind, columns).filter(([, y]) => has(y));
    if (!lines.length) return null;
    const drawn = lines.flatMap(([name, y], at) =>
      weight ? [{ name, y, colour: at, kind: "raw" }, { name, y: smoothed(y, weight), colour: at }] : [{ name, y, colour: at }],
    );
    return chart(title, x, drawn, options);
  }).filter(Boolean);
  const note = run.mean_of > 1 ? `Each point is the mean of ${run.mean_of} steps. ` : "";
  const controls = make(
    "div",
    { className: "controls" },
    select("over", axis, AXES, (value) => changeHere({ axis: value })),
    ...(run.stage_starts.length > 1 ? [select("stage", now.stage ?? "", [["", "all"], ...run.stage_starts.map(([name]) => [name, name])], (value) => changeHere({ stage: value }))] : []),
    smoothing(weight, (value) => changeHere({ smooth: value })),
    make("p", { className: "soft", textContent: `${note}Click at a step to see its rows; drag to zoom, double-click to zoom out.` }),
  );
  const nothing = make("p", { className: "empty", textContent: "The run has not written a step yet." });
  const wasOpen = main.querySelector("details.events")?.open;
  main.replaceChildren(head(run), controls, make("section", { className: "charts" }, ...(charts.length ? charts : [nothing])), events(run));
  if (wasOpen !== undefined) main.querySelector("details.events").open = wasOpen;
};
