// Tasks: pass rates over the run, and which are solved, never solved or unlearned.

import { make } from "../base.js";
import { chart, field, input, listing, number, pages, percent, select, soft, sparkline } from "../draw.js";
import { change, go, link, pick, query } from "../page.js";
import { notices } from "./experiences.js";

const WHICH = { all: "All", solved: "Solved", unsolved: "Never solved", unlearned: "Unlearned" };
const SORTS = [["-tries", "tries ↓"], ["tries", "tries ↑"], ["rate", "pass rate ↑"], ["-rate", "pass rate ↓"], ["change", "most unlearned"]];
const NAMES = ["which", "sort", "least", "before", "after", "span", "text", "offset"];
const PAGE = 50;

const controls = (now, found) => {
  const tabs = Object.entries(WHICH).map(([name, label]) => {
    const button = make("button", { type: "button", onclick: () => change({ which: name, offset: "", sort: name === "unlearned" ? "change" : "" }) }, label, make("small", { textContent: number(found.counts[name]) }));
    button.setAttribute("aria-pressed", String((now.which ?? "all") === name));
    return button;
  });
  const to = (name) => (value) => change({ [name]: value, offset: "" });
  const amount = (name, label, value, step) => field(label, input(label, value, to(name), { type: "number", step }));
  return [
    make("div", { className: "segments", role: "group", "aria-label": "Which tasks" }, ...tabs),
    make(
      "div",
      { className: "fields" },
      field("text", input("text", now.text ?? "", to("text"), { type: "search", placeholder: "in question or id" })),
      select("sort", now.sort ?? "-tries", SORTS, to("sort")),
      amount("least", "passes from reward", now.least ?? 1, "any"),
      amount("before", "checkpoint before", found.before, 1),
      amount("after", "checkpoint after", found.after, 1),
      amount("span", "versions up to each", now.span ?? 10, 1),
    ),
  ];
};

const curve = (found, run) => {
  const xs = [...new Set(found.sources.map(({ version }) => version))].sort((a, b) => a - b);
  const names = [...new Set(found.sources.map(({ source }) => source))];
  const lines = names.map((name, colour) => {
    const by = new Map(found.sources.filter(({ source }) => source === name).map((each) => [each.version, each.rate]));
    return { name: `${name} rows`, y: xs.map((x) => by.get(x)), colour, kind: "points" };
  });
  const onpick = (at) => go({ view: "experiences", run, min_version: xs[at], max_version: xs[at] + found.width - 1 });
  return xs.length ? chart("Pass rate by weight version", xs, lines, { height: 170, xname: "version", yrange: [-0.02, 1.02], onpick }) : "";
};

const line = (task, now) =>
  make(
    "tr",
    {},
    make("td", { className: "num" }, make("b", { textContent: percent(task.rate) })),
    make("td", {}, sparkline(task.curve, { low: 0, high: 1, dots: true })),
    make("td", { className: "num", textContent: number(task.tries) }),
    make("td", { className: `num ${task.change < 0 ? "fell" : task.change > 0 ? "rose" : ""}`, textContent: task.rate_before === null && task.rate_after === null ? "–" : `${percent(task.rate_before)} → ${percent(task.rate_after)}` }),
    make("td", { className: "what" }, link({ view: "experiences", run: now.run, task_id: task.task_id }, make("span", { className: "asked", textContent: task.question ?? "" }), soft(task.task_id))),
  );

export const draw = async (now, main, current) => {
  const found = await query("tasks", { run: now.run, limit: PAGE, ...pick(now, NAMES) });
  if (!current()) return;
  const heads = ["passes", "over versions", "tries", `v${found.before} → v${found.after}`, "task"];
  const first = Number(now.offset ?? 0);
  const rows = listing(heads, found.tasks.map((task) => line(task, now)));
  main.replaceChildren(
    ...notices(found.log),
    curve(found, now.run),
    ...controls(now, found),
    soft("Tries are the scored answers in the run folder, with those of dropped groups, of which it keeps the latest."),
    rows,
    pages("tasks", first, found.tasks.length, found.counts[now.which ?? "all"], PAGE, (to) => change({ offset: to })),
  );
};
