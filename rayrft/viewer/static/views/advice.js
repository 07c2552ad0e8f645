// Advice: causes for which the reward may be flat, each with its rows, its curve, and the key to change.

import { make } from "../base.js";
import { pill, soft } from "../draw.js";
import { link, query } from "../page.js";
import { notices } from "./experiences.js";

const KINDS = { run: ["the run itself", "bad"], data: ["data and rewards", "warn"], setting: ["setting", "calm"] };
const NOTHING = "Nothing stands out: no cause is known for which the reward should be flat.";

const card = (each, run) =>
  make(
    "article",
    { className: "run" },
    make("div", { className: "title" }, make("h2", { textContent: each.name }), pill(...KINDS[each.kind])),
    make("p", { textContent: each.found }),
    make("p", { className: "verdict", textContent: each.remedy }),
    make(
      "div",
      { className: "controls" },
      link({ view: "experiences", run, where: each.where }, each.logged ? "rows that show it" : "latest rows (those that show it are not recorded)"),
      ...(each.curve ? [link({ view: "run", run }, `curves, with ${each.curve}`)] : []),
    ),
  );

export const draw = async ({ run }, main, current) => {
  const found = await query("advice", { run });
  if (!current()) return;
  const text = found.steps < 10 ? "After ten steps there is advice." : NOTHING;
  const cards = found.advisories.map((each) => card(each, run));
  const first = cards.length ? soft("The first cause first: a run that is sick hides what its numbers say of data and settings.") : "";
  main.replaceChildren(...notices(found.log), first, ...(cards.length ? cards : [make("p", { className: "empty", textContent: text })]));
};
