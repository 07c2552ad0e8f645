// Before a run: the plan of its config, and what the doctor finds, which is asked only on request.

import { make } from "../base.js";
import { listing, number, pill, soft } from "../draw.js";
import { query } from "../page.js";

const STATES = { ok: "good", note: "warn", fault: "bad" };
const cell = (value) => {
  if (value in STATES) return pill(value, STATES[value]);
  if (typeof value === "boolean") return pill(value ? "yes" : "no", value ? "good" : "bad");
  if (typeof value === "number") return number(value);
  if (value && typeof value === "object") return Object.entries(value).map(([name, each]) => `${name} ${number(each)}`).join(", ");
  return value ?? "–";
};

// Rows of different kinds are different tables.
const tables = (rows) => {
  const kinds = Object.groupBy(rows, (row) => Object.keys(row).join());
  return Object.values(kinds).map((of) => listing(Object.keys(of[0]).map((name) => name.replaceAll("_", " ")), of.map((row) => make("tr", {}, ...Object.values(row).map((value) => make("td", { className: typeof value === "number" ? "num" : "" }, cell(value)))))));
};

const LIMIT_MS = 120_000; // a model of a hub is asked for again and again
const report = async (run, name) => {
  const found = await query("report", { run, name }, { signal: AbortSignal.timeout(LIMIT_MS) });
  return [...(found.problem ? [make("p", { className: "problem", textContent: found.problem })] : []), ...tables(found.rows)];
};

export const still = true; // it is of the config, which does not change

export const draw = async ({ run }, main, current) => {
  const plan = await report(run, "plan");
  if (!current()) return;
  const machines = make("section", {});
  const examine = make("button", { type: "button", textContent: "Examine the machines" });
  examine.onclick = async () => {
    examine.disabled = true;
    machines.replaceChildren(soft("This takes about ten seconds."));
    machines.replaceChildren(...(await report(run, "doctor")));
    examine.disabled = false;
  };
  main.replaceChildren(make("h2", { textContent: "Plan" }), soft("Memory on GPUs of 80 GB, and what a day of steps writes to the disk: rayrft plan"), ...plan, make("h2", { textContent: "Doctor" }), make("div", { className: "controls" }, examine), machines);
};
