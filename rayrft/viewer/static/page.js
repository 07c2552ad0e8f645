// The page: its address says which view is shown of what, so that every link can be sent. Views are modules with
// `draw(state, main, current)`, which is called again after a change of files unless the view is `still`.

import { ask, login, make, me, Refused, takeKey } from "./base.js";
import * as advice from "./views/advice.js";
import * as before from "./views/before.js";
import * as experiences from "./views/experiences.js";
import * as run from "./views/run.js";
import * as runs from "./views/runs.js";
import * as tasks from "./views/tasks.js";
import * as timeline from "./views/timeline.js";

const VIEWS = { runs, run, experiences, tasks, timeline, advice, before };
const NAMES = { runs: "Runs", run: "Curves", experiences: "Experiences", tasks: "Tasks", timeline: "Timeline", advice: "Advice", before: "Plan" };
const $ = (id) => document.getElementById(id);

let shown = 0; // the latest view that was asked for
let redraw = null;

// The state in the address

export const state = () => Object.fromEntries(new URLSearchParams(location.search));
export const address = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return `?${new URLSearchParams(given)}`;
};
export const go = (values, { replace = false } = {}) => {
  history[replace ? "replaceState" : "pushState"](null, "", address(values));
  show();
};
export const change = (values, options) => go({ ...state(), ...values }, options);
export const changeHere = (values) => change(values, { replace: true });
export const pick = (from, names) => Object.fromEntries(names.filter((name) => from[name]).map((name) => [name, from[name]]));
export const link = (values, ...children) => make("a", { href: address(values) }, ...children);

// Requests

export const query = async (name, values, options) => {
  for (;;) {
    try {
      const found = await ask(`${name}${address(values)}`, undefined, options);
      $("offline").hidden = true;
      return found;
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 401) throw error;
      await login(me().key ? error.message : "", { lead: "The command that serves this page says where its key is." });
    }
  }
};

// Views

let drawing = null; // the last view that was asked for
const show = () => (drawing = present());

const present = async () => {
  const mine = ++shown;
  const asked = state();
  const name = asked.view in VIEWS ? asked.view : "runs";
  document.title = asked.run ? `${asked.run} · rayrft` : "rayrft";
  $("views").replaceChildren(
    ...Object.entries(NAMES)
      .filter(([each]) => each === "runs" || asked.run)
      .map(([each, label]) => {
        const entry = link(each === "runs" ? {} : { view: each, run: asked.run }, label);
        if (each === name) entry.setAttribute("aria-current", "page");
        return entry;
      }),
    ...(asked.run ? [make("a", { href: `feedback/${encodeURIComponent(asked.run)}/`, textContent: "Feedback" })] : []),
  );
  $("views").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  $("run").textContent = asked.run ?? "";
  if ($("main").dataset.view !== `${name} ${asked.run}`) {
    $("main").dataset.view = `${name} ${asked.run}`;
    $("main").replaceChildren();
    scrollTo(0, 0);
  }
  redraw = null;
  if (name !== "experiences") closeDrawer();
  $("main").setAttribute("aria-busy", "true");
  try {
    const draw = () => keepingFocus(() => VIEWS[name].draw(state(), $("main"), () => mine === shown));
    await draw();
    if (mine !== shown) return;
    redraw = VIEWS[name].still ? () => {} : draw;
  } catch (error) {
    if (mine === shown) problem(error);
  }
  if (mine === shown) $("main").setAttribute("aria-busy", "false");
};

// What is drawn again has the focus where it was; while something is typed into a field, nothing is.
const keepingFocus = async (draw) => {
  await draw();
  const label = focused;
  if (label && document.activeElement === document.body) {
    $("main").querySelector(`[aria-label="${CSS.escape(label)}"]`)?.focus({ preventScroll: true });
  }
};
let focused = null;
addEventListener("focusin", ({ target }) => (focused = target.getAttribute("aria-label")));
addEventListener("pointerdown", () => (focused = null));
const isTyping = () => {
  const at = document.activeElement;
  return at.matches("input:not([type='checkbox'], [type='range'])") && at.value !== at.defaultValue;
};

const closeDrawer = () => {
  $("drawer").hidden = true;
  $("drawer").replaceChildren();
  document.body.classList.remove("with-drawer");
};

const problem = (error) => {
  $("offline").hidden = false;
  $("offline").textContent = error.message;
};

// Changes: a request waits at the server until files have changed.

const WAIT_MS = 60_000;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

const follow = async () => {
  let of = null;
  let seen = "";
  for (;;) {
    if (document.hidden) await new Promise((done) => addEventListener("visibilitychange", done, { once: true }));
    const { run: about = "" } = state();
    const first = about !== of;
    if (first) [of, seen] = [about, ""];
    try {
      const found = await query("changes", { run: about, seen }, { signal: AbortSignal.timeout(WAIT_MS) });
      $("live").textContent = "live";
      $("live").className = "on";
      if ((state().run ?? "") !== of) continue;
      const changed = found.seen !== seen;
      seen = found.seen;
      if (first) await drawing;
      const lags = $("main").querySelector(".notice") !== null; // its log may have been read before the first answer
      if (changed && (!first || lags) && !isTyping()) await (redraw ?? show)();
    } catch (error) {
      $("live").textContent = "not connected";
      $("live").className = "";
      if (!(error instanceof Refused)) problem({ message: `The server does not answer: ${error.message}` });
      await pause(2000);
    }
  }
};

addEventListener("popstate", show);
addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href^='?']");
  if (!anchor || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  history.pushState(null, "", anchor.getAttribute("href"));
  show();
});
takeKey();
show();
follow();
