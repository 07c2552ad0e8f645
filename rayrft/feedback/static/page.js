// The page: shows one item at a time, and sends what a person says of it. Text of a model goes through textContent only.

import { above, keycap, login as enter, make, picture, run, text, turn } from "./base.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const VIEWS = { one: "Answer", pair: "Pair", group: "Rank" };
const LETTERS = "ABCDEFGHI";
const SLOW_MS = 3000; // a person who waits longer sees a message

let about = null;
let item = null;
let draft = store.emptyDraft();
let view = store.view();
let shownAt = 0;
let asked = 0; // the latest request for an item: answers to earlier ones are not shown
let progress = null;
let sending = null;
const news = []; // what the run did not take of what was said earlier

// Elements

const thumb = () => {
  const [drawing, path] = ["svg", "path"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  drawing.setAttribute("viewBox", "0 0 24 24");
  drawing.setAttribute("aria-hidden", "true");
  path.setAttribute("d", "M7 10v11H3V10zm0 10h10.5a2 2 0 0 0 2-1.6l1.4-6.5a2 2 0 0 0-2-2.4H14l.9-4.6A2 2 0 0 0 13 2.5L7 10");
  drawing.append(path);
  return drawing;
};

const toast = (message, kind = "") => {
  $("toast").textContent = message;
  $("toast").className = kind;
};

// What is shown

// Between items nothing is taken for the one that is gone.
const busy = (is) => {
  if (is) item = null;
  $("main").setAttribute("aria-busy", String(is));
  $("main").inert = is; // what is typed belongs to an item
};

const show = (next, kept = null) => {
  busy(false);
  item = next;
  draft = item ? (kept ?? store.draft(item.key)) : store.emptyDraft();
  const restored = item && !kept && store.hasDraft(item.key);
  shownAt = performance.now();
  for (const part of ["context", "answers", "reveal", "more", "choices"]) $(part).hidden = !item;
  $("dock").hidden = false;
  $("empty").hidden = Boolean(item);
  $("main").className = item && item.view !== "one" ? `wide ${item.view}` : "";
  reveal("reference", false);
  reveal("verdict", false);
  if (!item) {
    for (const part of ["answers", "choices", "labels"]) $(part).replaceChildren();
    return paint();
  }
  $("context").replaceChildren(...item.context.map((each) => turn(each)), ...pictures());
  $("answers").replaceChildren(...item.answers.map(answerCard));
  $("edit").hidden = item.view !== "one";
  $("reference-open").hidden = item.reference === null;
  fillReference();
  fillVerdict();
  $("labels").replaceChildren(
    ...about.labels.map((label, at) => {
      const button = make("button", { type: "button", onclick: () => toggleLabel(label) }, label, " ", keycap(`⇧${at + 1}`));
      button.dataset.label = label;
      return button;
    }),
  );
  fillChoices();
  $("comment").value = draft.comment;
  paint();
  window.scrollTo(0, 0);
  // A warning about what was said before stays.
  if (restored && !$("toast").className) toast("What you typed here before is back.");
};

const pictures = () =>
  Array.from({ length: item.images }, (_, number) =>
    picture(new URLSearchParams({ item: item.key, number }), `Image ${number + 1}`),
  );

const answerCard = (answer, at) => {
  const several = item.view !== "one";
  const head = make("div", { className: "head" });
  head.append(make("span", { className: "name", textContent: several ? `Answer ${LETTERS[at]}` : "Answer" }));
  if (answer.stop_reason === "length") head.append(make("span", { className: "chip", textContent: "cut off" }));
  const card = make("article", { className: "answer" }, head);
  card.dataset.id = answer.id;
  const turns = answer.turns;
  turns.forEach((each, place) => card.append(turn(each, turns.length > 1 || place < turns.length - 1)));
  if (several) {
    card.classList.add("choice");
    card.addEventListener("click", () => {
      if (!String(getSelection())) choose(at);
    });
  }
  return card;
};

const fillReference = () => {
  $("reference").replaceChildren(
    make("p", { className: "role", textContent: "Reference answer" }),
    ...text(item.reference ?? ""),
  );
};

const number = (value) => (value === null ? "unknown" : String(Math.round(value * 1000) / 1000));

const fillVerdict = () => {
  const tables = item.answers.map((answer, at) => {
    const parts = Object.entries(answer.components).map(([name, value]) => [name, number(value)]);
    const told = [["reason", answer.reason], ["ended by", answer.stop_reason]].filter(([, value]) => value);
    const title = item.answers.length > 1 ? `Reward of answer ${LETTERS[at]}` : "The reward's verdict";
    return [make("p", { className: "role", textContent: title }), rows([["reward", number(answer.reward)], ...parts, ...told])];
  });
  $("verdict").replaceChildren(...tables.flat());
};

const fillChoices = () => {
  const button = (name, value, hint, className = "") => {
    const made = make("button", { type: "button", className, onclick: () => act[name](value) });
    made.append(hint.label, ...(hint.key ? [" ", keycap(hint.key)] : []));
    if (hint.title) made.setAttribute("aria-label", hint.title);
    made.dataset.choice = `${name}:${value}`;
    return made;
  };
  const choices = [];
  if (item.view === "one") {
    for (let score = 1; score <= about.levels; score++) {
      choices.push(button("score", score, { label: String(score), title: `Score ${score}` }, "number"));
    }
    choices.push(make("span", { className: "gap" }));
    choices.push(button("thumb", "up", { label: thumb(), title: "Thumb up", key: "+" }, "good"));
    choices.push(button("thumb", "down", { label: thumb(), title: "Thumb down", key: "−" }, "bad"));
  } else if (item.view === "pair") {
    choices.push(button("pick", 0, { label: "A is better", key: "←" }));
    choices.push(button("tie", true, { label: "Same", key: "0" }));
    choices.push(button("pick", 1, { label: "B is better", key: "→" }));
  } else {
    item.answers.forEach((_, at) => {
      const title = `Answer ${LETTERS[at]} comes next`;
      choices.push(button("rank", at, { label: LETTERS[at], title }, "number"));
    });
    choices.push(button("clear", true, { label: "Clear", key: "⌫" }));
  }
  $("choices").replaceChildren(...choices);
  $("hint").textContent = hint();
};

// What becomes of what is said.
const hint = () => {
  if (!item.waiting) return "The run has trained on this already, or dropped it: what you say is kept for exports.";
  const [low, high] = about.rewards ?? [];
  const worth = (text) => (about.rewards ? `${text} In training this replaces its reward.` : "Kept as labels; rewards stay.");
  return {
    one: () => worth(`Reward of the answer: 1 is ${low}, ${about.levels} is ${high}; thumbs are the two ends.`),
    pair: () => "Pairs are kept for preference training (DPO); rewards stay.",
    group: () => worth(`Choose the best answer first, then the next best: the first gets ${high}, the last ${low}.`),
  }[item.view]();
};

// Shows the state of the draft in what is there.
const paint = () => {
  for (const button of $("choices").querySelectorAll("button")) {
    const [name, value] = button.dataset.choice.split(":");
    const pressed = {
      score: () => String(draft.score) === value,
      thumb: () => draft.thumb === value,
      pick: () => draft.ranking[0] === item.answers[Number(value)].id,
      tie: () => draft.tie,
      rank: () => draft.ranking.includes(item.answers[Number(value)].id),
      clear: () => null,
    }[name]();
    if (pressed !== null) button.setAttribute("aria-pressed", String(pressed));
  }
  for (const button of $("labels").children) {
    button.setAttribute("aria-pressed", String(draft.labels.includes(button.dataset.label)));
  }
  for (const card of $("answers").children) {
    const at = draft.ranking.indexOf(card.dataset.id);
    card.classList.toggle("chosen", item.view === "pair" ? at === 0 : at >= 0);
    card.querySelector(".place")?.remove();
    if (at >= 0 && item.view === "group") {
      card.querySelector(".head").append(make("span", { className: "place", textContent: String(at + 1) }));
    }
    if (at === 0 && item.view === "pair") {
      card.querySelector(".head").append(make("span", { className: "place", textContent: "better" }));
    }
  }
  $("at-once").setAttribute("aria-pressed", String(store.savesAtOnce()));
  if (item) paintEdit();
  $("save").disabled = !item || !isComplete();
  $("skip").disabled = !item;
  paintUndo();
  paintProgress();
};

const paintUndo = () => {
  $("undo").disabled = !(progress?.mine.latest || unsentJudgements().length);
};

const paintEdit = () => {
  const editing = draft.edit !== null;
  $("edit").setAttribute("aria-pressed", String(editing));
  const card = $("answers").firstElementChild;
  const area = card.querySelector("textarea");
  if (editing && !area) {
    const written = make("textarea", { value: draft.edit, "aria-label": "The answer as it should be" });
    written.addEventListener("input", () => change({ edit: written.value }));
    card.append(written);
    card.querySelector(".turn:last-of-type").hidden = true;
  } else if (!editing && area) {
    area.remove();
    card.querySelector(".turn:last-of-type").hidden = false;
  }
};

const paintProgress = () => {
  if (!progress) return;
  const total = progress.totals[view] ?? 0;
  const left = progress.left[view] ?? 0;
  $("progress").textContent = `${total - left} of ${total}`;
  $("meter").firstElementChild.style.width = total ? `${(100 * (total - left)) / total}%` : "0";
  $("person").textContent = `${store.me().person} · ${progress.mine.judged}`;
  $("views").replaceChildren(
    ...Object.entries(VIEWS)
      .filter(([name]) => progress.totals[name])
      .map(([name, label]) => {
        const button = make("button", { type: "button", onclick: () => setView(name) }, label, " ");
        button.append(make("small", { textContent: String(progress.left[name]) }));
        button.dataset.view = name;
        button.setAttribute("aria-pressed", String(name === view));
        return button;
      }),
  );
  const empty = total ? "Every answer has been judged." : "The run has no answers of this kind yet.";
  $("empty-text").textContent = progress.running ? `${empty} New ones come while the run samples.` : empty;
};

const reveal = (name, open = $(name).hidden) => {
  $(name).hidden = !open;
  $(`${name}-open`).setAttribute("aria-expanded", String(open));
};

const edited = () => (draft.edit !== null && draft.edit !== item.answers[0].text ? draft.edit : null);
const isComplete = () => {
  const ranked = draft.ranking.length === item.answers.length;
  const said = draft.score || draft.thumb || draft.tie || draft.labels.length || draft.comment.trim();
  if (draft.edit !== null && !draft.edit.trim()) return false;
  return item.view === "group" && draft.ranking.length ? ranked : Boolean(said || ranked || edited() !== null);
};

// What a person does

const change = (values) => {
  draft = { ...draft, ...values };
  store.setDraft(item.key, draft);
  paint();
};

const toggleLabel = (label) => {
  const labels = draft.labels.filter((each) => each !== label);
  change({ labels: labels.length < draft.labels.length ? labels : [...labels, label] });
};

const toggleAtOnce = () => {
  store.setSavesAtOnce(!store.savesAtOnce());
  paint();
};

const CHOICES = {
  score: (score) => change({ score: draft.score === score ? null : score }),
  thumb: (thumb) => change({ thumb: draft.thumb === thumb ? null : thumb }),
  pick: (at) => {
    const ids = item.answers.map((answer) => answer.id);
    change({ ranking: [ids[at], ids[1 - at]], tie: false });
  },
  tie: () => change({ tie: !draft.tie, ranking: [] }),
  rank: (at) => {
    const { id } = item.answers[at];
    const kept = draft.ranking.filter((each) => each !== id);
    const ranking = kept.length < draft.ranking.length ? kept : [...kept, id];
    const rest = item.answers.map((answer) => answer.id).filter((each) => !ranking.includes(each));
    // The last place is what is left, unless it has just been taken away.
    change({ ranking: rest.length === 1 && ranking.length > kept.length ? [...ranking, rest[0]] : ranking });
  },
  clear: () => change({ ranking: [] }),
};

// Does what a choice says, and saves it at once if the person wants that and it is all that is to be said.
const act = Object.fromEntries(
  Object.entries(CHOICES).map(([name, choice]) => [
    name,
    (value) => {
      choice(value);
      const chosen = draft.score || draft.thumb || draft.tie || draft.ranking.length;
      if (store.savesAtOnce() && chosen && draft.edit === null) save();
    },
  ]),
);

const choose = (at) => {
  if (at >= item.answers.length) return;
  if (item.view === "pair") act.pick(at);
  else if (item.view === "group") act.rank(at);
};

const toggleEdit = () => {
  if (!item || item.view !== "one") return;
  const { text } = item.answers[0];
  if (draft.edit === null) change({ edit: draft.aside ?? text, aside: null });
  else change({ edit: null, aside: draft.edit === text ? null : draft.edit });
  $("answers").querySelector("textarea")?.focus();
};

const save = (skipped = false) => {
  if (!item || (!skipped && !isComplete())) return;
  const { aside, ...said } = skipped ? store.emptyDraft() : { ...draft, edit: item.view === "one" ? edited() : null };
  store.post({
    ...said,
    id: store.newId(),
    person: store.me().person,
    item: item.key,
    rows: item.answers.map((answer) => answer.id),
    skipped,
    seconds: Math.round(performance.now() - shownAt) / 1000,
    shown: item,
  });
  busy(true);
  paintUndo();
  document.activeElement?.blur();
  send();
};

const OUTCOMES = {
  applied: () => ["Saved."],
  late: (reason) => [`Kept, but too late for the run: ${reason}.`, "warn"],
  refused: (reason) => [`Kept, but the run refused it: ${reason}`, "bad"],
  kept: () => [progress?.running ? "Saved. It is being sent to the run." : "Saved. The run is not running."],
  undone: () => ["Undone."],
};

const tell = (answer) => {
  let [message, kind] = OUTCOMES[answer.outcome](answer.reason);
  if (answer.others?.length) {
    message += ` ${answer.others.join(", ")} had this item as well: both of you count.`;
    kind = kind ?? "warn";
  }
  toast(message, kind);
};

// The server

const wait = (seconds) =>
  new Promise((done) => {
    setTimeout(done, seconds * 1000);
    addEventListener("online", done, { once: true });
  });

// Asks until the server answers, or it is not wanted any more.
const insist = async (path, body, wanted = () => true) => {
  for (let seconds = 0.5; wanted(); seconds = Math.min(10, seconds * 2)) {
    const slow = setTimeout(offline, SLOW_MS);
    try {
      const answer = await store.ask(path, body);
      $("offline").hidden = true;
      if (answer.mine) progress = answer;
      // In the list under Statistics, too: a toast is soon gone.
      for (const { outcome, reason } of answer.news ?? []) {
        news.push([outcome === "late" ? "too late" : "refused", reason]);
        toast(`An earlier judgement: ${OUTCOMES[outcome](reason)[0]}`, "warn");
      }
      return answer;
    } catch (error) {
      if (error instanceof store.Refused) $("offline").hidden = true;
      if (error instanceof store.Refused && error.status === 401) {
        await login(error.message);
        continue;
      }
      if (!(error instanceof store.Unreachable)) throw error;
      offline();
      await wait(seconds);
    } finally {
      clearTimeout(slow);
    }
  }
};

const offline = () => {
  $("offline").hidden = false;
  $("offline").textContent = "The server does not answer. What you typed is kept here, and sent when it is back.";
};

// Sends what is in the outbox, one after another, then shows the next item, unless something else was shown meanwhile.
const send = () => {
  const before = asked;
  sending ??= sendAll().finally(() => (sending = null));
  return sending.then(() => (before === asked ? next() : undefined));
};

const sendAll = async () => {
  for (let [first] = store.outbox(); first; [first] = store.outbox()) {
    const isThere = () => store.outbox().some((each) => each.id === first.id);
    const taken = await (first.undoes ? sendUndo : sendJudgement)(first, isThere);
    // What was taken back meanwhile is followed in the outbox by what says so.
    if (taken) store.unpost(first.id);
  }
};

const sendJudgement = async ({ shown, ...judgement }, isThere) => {
  try {
    const answer = await insist("judge", judgement, isThere);
    if (!isThere()) return false;
    tell(answer);
    if (!judgement.skipped) store.setDraft(judgement.item, store.emptyDraft());
  } catch (error) {
    if (!(error instanceof store.Refused)) throw error;
    if (!isThere()) return false;
    store.giveBack(judgement, error.message);
    toast(`Not taken: ${error.message} What you said is kept under Statistics.`, "bad");
  }
  return true;
};

const sendUndo = async ({ person, undoes }) => {
  try {
    tellUndone(await insist("undo", { person, id: undoes }));
  } catch (error) {
    if (!(error instanceof store.Refused)) throw error; // the server has never seen it
  }
  return true;
};

const tellUndone = ({ outcome, reason }) => {
  toast(outcome === "late" || outcome === "refused" ? `Undone, but ${reason}.` : "Undone.");
};

const next = async () => {
  const mine = ++asked;
  const answer = await insist("next", { person: store.me().person, view });
  if (mine === asked) show(answer.item);
};

const undo = async () => {
  if ($("undo").disabled) return;
  const [unsent] = unsentJudgements().slice(-1);
  if (unsent) {
    ++asked;
    // The server may have it already, or be about to.
    store.post({ id: store.newId(), person: unsent.person, undoes: unsent.id });
    store.unpost(unsent.id);
    show(unsent.shown, unsent.skipped ? null : pick(unsent));
    change({});
    return;
  }
  const answer = await insist("undo", { person: store.me().person, id: progress.mine.latest });
  ++asked;
  tellUndone(answer);
  if (!answer.item) return next();
  view = answer.item.view;
  store.setView(view);
  show(answer.item, answer.draft.skipped ? null : pick(answer.draft));
  change({});
};

const unsentJudgements = () => store.outbox().filter((each) => !each.undoes);

const pick = (from) => Object.fromEntries(Object.keys(store.emptyDraft()).map((name) => [name, from[name]]));

const setView = async (name) => {
  if (name === view || !progress?.totals[name]) return;
  view = name;
  store.setView(name);
  busy(true);
  paintProgress();
  toast("");
  await next();
};

const step = (by) => {
  const names = Object.keys(VIEWS).filter((name) => progress?.totals[name]);
  setView(names[(names.indexOf(view) + by + names.length) % names.length]);
};

// Dialogs

const login = (problem = "") =>
  enter(problem, { title: "Who are you?", lead: "Your name stands beside what you say of answers.", named: true });

const showHelp = () => {
  const rows = [
    [`1 … ${about?.levels ?? 5}`, "score the answer; while ranking, which answer comes next"],
    ["+ −", "thumb up, thumb down"],
    ["← →", "of two answers the left or the right one is better"],
    ["0", "neither is better"],
    ["⌫", "rank again from the start"],
    ["E", "edit the answer; Escape leaves the text"],
    ["⇧1 … ⇧9", "labels"],
    ["C", "comment"],
    ["R V", "reference answer, the reward's verdict"],
    ["↵", "save and continue; in a text Ctrl ↵"],
    ["S", "skip"],
    ["A", "save each choice at once, or not"],
    ["Z", "undo"],
    ["[ ]", "single answers, pairs, groups"],
    ["I", "statistics"],
  ];
  $("keys").replaceChildren(
    ...rows.flatMap(([keys, meaning]) => [
      make("dt", {}, ...keys.split(" ").map((each) => (each === "…" ? " … " : keycap(each)))),
      make("dd", { textContent: meaning }),
    ]),
  );
  $("help").showModal();
};

const rows = (entries) => {
  const cells = ([name, value]) => [make("th", { scope: "row", textContent: name }), make("td", { textContent: String(value) })];
  return make("table", {}, ...entries.map((entry) => make("tr", {}, ...cells(entry))));
};

const showStats = async () => {
  const found = await insist("stats");
  const { mine } = progress;
  const part = (title, entries) => {
    return entries.length ? [make("section", {}, make("h3", { textContent: title }), rows(entries))] : [];
  };
  const figure = ({ question, value, items, people }) => [
    question,
    `Krippendorff's alpha ${value === null ? "not defined" : value.toFixed(2)}, ${people} people, ${items} items`,
  ];
  $("stats-body").replaceChildren(
    ...part("You", [
      ["judged", mine.judged],
      ["in the last 24 h", mine.today],
      ["edited", mine.edited],
      ["skipped", mine.skipped],
      ["seconds each", mine.seconds === null ? "—" : mine.seconds.toFixed(1)],
    ]),
    ...part("Everybody", Object.entries(found.people)),
    ...part("Agreement", found.agreement.map(figure)),
    ...part("Answers changed in the run", Object.entries(found.rows).filter(([, count]) => count)),
    ...part("Edited answers in the run", Object.entries(found.edits)),
    ...part("Not taken by the run", news),
    ...part("Not taken by the server", store.returned().map((each) => [each.why, JSON.stringify(each)])),
  );
  if (about.notice) $("stats-body").append(make("p", { textContent: about.notice }));
  $("stats").showModal();
};

const leave = async () => {
  $("stats").close();
  await insist("leave", { person: store.me().person });
  await login();
  await begin();
};

// Keys

const KEYS = {
  e: toggleEdit,
  c: () => $("comment").focus(),
  s: () => save(true),
  a: () => toggleAtOnce(),
  z: undo,
  r: () => item?.reference !== null && reveal("reference"),
  v: () => reveal("verdict"),
  i: showStats,
  "?": showHelp,
  "[": () => step(-1),
  "]": () => step(1),
  "+": () => item?.view === "one" && act.thumb("up"),
  "=": () => item?.view === "one" && act.thumb("up"),
  "-": () => item?.view === "one" && act.thumb("down"),
  ArrowLeft: () => item?.view === "pair" && act.pick(0),
  ArrowRight: () => item?.view === "pair" && act.pick(1),
  0: () => item?.view === "pair" && act.tie(),
  Backspace: () => item?.view === "group" && act.clear(),
  Enter: () => save(),
};

const onKey = (event) => {
  if (document.querySelector("dialog[open]") || event.isComposing) return;
  const { target } = event;
  if (target.matches("textarea, input")) {
    if (event.key === "Escape") target.blur();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    else return;
    event.preventDefault();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // A button that was reached by the keyboard does what it says. Those of a dialog keep the focus for a moment after it.
  const reached = target.matches("button:focus-visible, summary:focus-visible") && !target.closest("dialog");
  if (event.key === "Enter" && reached) return;
  const digit = /^Digit([1-9])$/.exec(event.code)?.[1] ?? (/^[1-9]$/.test(event.key) ? event.key : null);
  let action = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (digit && event.shiftKey && !["?", "+", "="].includes(event.key)) {
    const label = about?.labels[Number(digit) - 1];
    action = item && label !== undefined ? () => toggleLabel(label) : null;
  } else if (digit && !event.shiftKey) {
    const at = Number(digit);
    action = () => (item?.view !== "one" ? choose(at - 1) : at <= about.levels && act.score(at));
  }
  if (!action || (!item && !["z", "i", "?", "[", "]"].includes(event.key.toLowerCase()))) return;
  event.preventDefault();
  action();
};

// The beginning

const begin = async () => {
  const answer = await insist("me", { person: store.me().person });
  about = answer;
  $("run").textContent = about.run;
  document.title = `Feedback · ${about.run}`;
  if (!progress.totals[view]) view = Object.keys(VIEWS).find((name) => progress.totals[name]) ?? "one";
  if (about.notice) toast(about.notice, "warn");
  await send();
};

const beat = () => {
  if (!item || document.hidden) return;
  const of = item.key;
  store.ask("keep", { person: store.me().person, item: of }).then(
    ({ kept }) => kept || item?.key !== of || toast("Somebody else has this answer now, too: both of you count.", "warn"),
    () => {},
  );
};

const start = async () => {
  store.takeKey();
  if (above) $("person").before(make("a", { href: `${above}?view=run&run=${run}`, textContent: "Viewer" }));
  $("reference-open").onclick = () => reveal("reference");
  $("verdict-open").onclick = () => reveal("verdict");
  $("edit").onclick = toggleEdit;
  $("undo").onclick = undo;
  $("skip").onclick = () => save(true);
  $("save").onclick = () => save();
  $("person").onclick = showStats;
  $("help-open").onclick = showHelp;
  $("leave").onclick = leave;
  $("look-again").onclick = next;
  $("comment").addEventListener("input", () => change({ comment: $("comment").value }));
  $("at-once").onclick = toggleAtOnce;
  addEventListener("keydown", onKey);
  // A button that was clicked gives the focus back: Enter saves. One that was pressed by a key keeps it.
  addEventListener("click", (event) => event.detail && event.target.closest?.("button, summary")?.blur());
  addEventListener("pagehide", () => {
    // With something typed the item stays this person's until the lease expires.
    if (item && !store.hasDraft(item.key)) {
      store.ask("leave", { person: store.me().person }, { keepalive: true }).catch(() => {});
    }
  });
  if (!store.me().person) await login();
  addEventListener("visibilitychange", beat);
  await begin();
  setInterval(beat, (about.lease_s * 1000) / 3);
};

start();
