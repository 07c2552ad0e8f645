// Tasks: pass rates over the run, and which are solved, never solved or unlearned.

import { make } from "../base.js";
import { chart, number, percent, select, sparkline } from "../draw.js";
import { go, link, query, state } from "../page.js";
import { notices } from "./experiences.js";

const WHICH = { all: "All", solved: "Solved", unsolved: "Never solved", unlearned: "Unlearned" };
const SORTS = [["-tries", "tries ↓"], ["tries", "tries ↑"], ["rate", "pass rate ↑"], ["-rate", "pass rate ↓"], ["change", "most unlearned"]];
const NAMES = ["which", "sort", "least", "before", "after", "span", "text", "offset"];
const PAGE = 50;

const set = (values) => go({ ...state(), ...values });

const controls = (now, found) => {
  const tabs = Object.entries(WHICH).map(([name, label]) => {
    const button = make("button", { type: "button", onclick: () => set({ which: name, offset: "", sort: name === "unlearned" ? "change" : "" }) }, label, make("small", { textContent: number(found.counts[name]) }));
    button.setAttribute("aria-pressed", String((now.which ?? "all") === name));
    return button;
  });
  const amount = (name, label, value, step) => {
    const input = make("input", { type: "number", step, value, "aria-label": label, onchange: () => set({ [name]: input.value, offset: "" }) });
    return make("label", { className: "field" }, make("span", { textContent: label }), input);
  };
  const text = make("input", { type: "search", value: now.text ?? "", placeholder: "in question or id", "aria-label": "text", onchange: () => set({ text: text.value.trim(), offset: "" }) });
  return [
    make("div", { className: "segments", role: "group", "aria-label": "Which tasks" }, ...tabs),
    make(
      "div",
      { className: "fields" },
      make("label", { className: "field" }, make("span", { textContent: "text" }), text),
      select("sort", now.sort ?? "-tries", SORTS, (value) => set({ sort: value, offset: "" })),
      amount("least", "passes from reward", now.least ?? 1, "any"),
      amount("before", "checkpoint before", found.before, 1),
      amount("after", "checkpoint after", found.after, 1),
      amount("span", "versions up to each", now.span ?? 10, 1),
    ),
  ];
};

const curve = (found) => {
  const xs = [...new Set(found.sources.map(({ version }) => version))].sort((a, b) => a - b);
  const names = [...new Set(found.sources.map(({ source }) => source))];
  const lines = names.map((name, colour) => {
    const by = new Map(found.sources.filter(({ source }) => source === name).map((each) => [each.version, each.rate]));
    return { name: `${name} rows`, y: xs.map((x) => by.get(x)), colour, kind: "points" };
  });
  return xs.length ? chart("Pass rate by weight version", xs, lines, { height: 170, xname: "version", yrange: [-0.02, 1.02] }) : "";
};

const line = (task, now) =>
  make(
    "tr",
    {},
    make("td", { className: "num" }, make("b", { textContent: percent(task.rate) })),
    make("td", {}, sparkline(task.curve, { low: 0, high: 1, dots: true })),
    make("td", { className: "num", textContent: number(task.tries) }),
    make("td", { className: `num ${task.change < 0 ? "fell" : task.change > 0 ? "rose" : ""}`, textContent: task.rate_before === null && task.rate_after === null ? "–" : `${percent(task.rate_before)} → ${percent(task.rate_after)}` }),
    make("td", { className: "what" }, link({ view: "experiences", run: now.run, task_id: task.task_id }, make("span", { className: "asked", textContent: task.question ?? "" }), make("span", { className: "soft", textContent: task.task_id }))),
  );

export const show = async (asked, main, current) => {
  const draw = async () => {
    const now = state();
    const given = Object.fromEntries(NAMES.filter((name) => now[name]).map((name) => [name, now[name]]));
    const found = await query("tasks", { run: now.run, limit: PAGE, ...given });
    if (!current()) return;
    const heads = ["passes", "over versions", "tries", `v${found.before} → v${found.after}`, "task"];
    const first = Number(now.offset ?? 0);
    const total = found.counts[now.which ?? "all"];
    const page = (to, name) => {
      const button = make("button", { type: "button", textContent: name, onclick: () => set({ offset: to || "" }) });
      button.disabled = to < 0 || to >= total;
      return button;
    };
    const about = total ? `${number(first + 1)}–${number(first + found.tasks.length)} of ${number(total)} tasks` : "No such task.";
    const rows = make("table", { className: "rows" }, make("thead", {}, make("tr", {}, ...heads.map((textContent) => make("th", { textContent })))), make("tbody", {}, ...found.tasks.map((task) => line(task, now))));
    const writing = main.contains(document.activeElement) && document.activeElement.matches("input");
    if (writing && main.querySelector(".rows")) return main.querySelector("table.rows").replaceWith(rows);
    main.replaceChildren(
      ...notices(found.log),
      curve(found),
      ...controls(now, found),
      make("div", { className: "scroll" }, rows),
      make("div", { className: "row pages" }, page(first - PAGE, "Back"), make("span", { className: "soft", textContent: about }), page(first + PAGE, "More")),
    );
  };
  await draw();
  return draw;
};
