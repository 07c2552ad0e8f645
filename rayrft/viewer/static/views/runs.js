// All runs, and the chosen ones on one axis.

import { make } from "../base.js";
import { answersOf, AXES, chart, duration, metric, number, rowsAt, select, smoothed, smoothing, soft, sparkline, steps, summary } from "../draw.js";
import { changeHere, go, link, query } from "../page.js";

const last = (values) => values.filter((each) => each !== null).at(-1) ?? null;

const linked = (to, value) => (to && value !== null ? link(to, number(value)) : number(value));

const card = (run, chosen, toggle) => {
  const box = make("input", { type: "checkbox", checked: chosen.includes(run.run), "aria-label": `Compare ${run.run}`, onchange: toggle });
  return summary(
    run,
    [box, link({ view: "run", run: run.run }, run.run)],
    metric("step", steps(run), soft(run.stage ? `stage ${run.stage}` : "")),
    metric("weights", `v${run.version}`, soft(run.seconds ? duration(run.seconds) : "")),
    metric("reward", linked(rowsAt(run.run, [run.step], 0, 1), last(run.reward)), sparkline(run.reward, { dots: true })),
    metric("accuracy", linked(run.evaluated !== null && answersOf(run.run, run.evaluated), run.accuracy.at(-1)?.[1] ?? null), sparkline(run.accuracy, { dots: true })),
  );
};

const comparison = async (asked, chosen) => {
  const { axis = "step", metric = "reward" } = asked;
  const weight = Number(asked.smooth ?? 0.6);
  const found = await query("compare", { runs: chosen.join(","), metric, axis });
  const xs = [...new Set(found.curves.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const series = found.curves.flatMap(({ run, x, y, steps: means, versions, mean_of: count }) => {
    const by = new Map(x.map((each, at) => [each, at]));
    const spread = (values) => xs.map((each) => (by.has(each) ? values[by.get(each)] : undefined));
    const at = chosen.indexOf(run);
    const rows = (place) => (versions ? versions[place] !== null && answersOf(run, versions[place]) : rowsAt(run, means, place, count));
    const line = { name: run, y: spread(y), colour: at, rows: (each) => rows(by.get(each)) };
    if (metric === "accuracy") return { ...line, kind: "points" };
    const smooth = { ...line, y: spread(smoothed(y, weight)) };
    return weight ? [{ ...line, kind: "raw" }, smooth] : smooth;
  });
  const means = found.curves.filter(({ mean_of: count }) => count > 1).map(({ run, mean_of: count }) => `${count} steps of ${run}`).join(", ");
  const controls = make(
    "div",
    { className: "controls" },
    select("metric", metric, (found.metrics.length ? found.metrics : [metric]).map((each) => [each, each]), (value) => changeHere({ metric: value })),
    select("over", axis, AXES, (value) => changeHere({ axis: value })),
    smoothing(weight, (value) => changeHere({ smooth: value })),
    soft(`Click at a point to see its rows.${means ? ` It is the mean of ${means}.` : ""}`),
  );
  const onpick = (at, { rows }) => rows(xs[at]) && go(rows(xs[at]));
  return make("section", { className: "compare" }, controls, chart(`${metric} over ${axis}`, xs, series, { height: 300, xname: axis, onpick }));
};

export const draw = async (now, main, current) => {
  const found = await query("runs", {});
  if (!current()) return;
  const names = found.runs.map(({ run }) => run);
  const first = found.runs.filter(({ reward }) => reward.length).slice(0, 3).map(({ run }) => run);
  const chosen = "compare" in now ? now.compare.split(",").filter((each) => names.includes(each)) : first;
  const cards = found.runs.map((run) =>
    card(run, chosen, () => {
      const left = chosen.filter((each) => each !== run.run);
      const next = left.length < chosen.length ? left : [...chosen, run.run];
      changeHere({ compare: next.length ? next.join(",") : "," });
    }),
  );
  const compared = chosen.length ? await comparison(now, chosen) : "";
  if (!current()) return;
  const empty = make("p", { className: "empty", textContent: `There are no runs in ${found.storage}.` });
  main.replaceChildren(compared, make("section", { className: "runs" }, ...(cards.length ? cards : [empty])));
};
