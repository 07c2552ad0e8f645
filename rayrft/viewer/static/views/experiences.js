// Experiences: filtered and sorted, and one beside its group, with its turns and tokens. All of it is in the address.

import { make, picture, text, turn } from "../base.js";
import { colour, field, input, listing, number, pages, percent, pill, select, soft } from "../draw.js";
import { change, changeHere, link, pick, query } from "../page.js";

const RANGES = { reward: "reward", tokens: "tokens", staleness: "staleness", version: "version", step: "trained in step" };
const CHOICES = { group_status: "group", source: "source", stop_reason: "ended by", status: "status", drop_reason: "dropped for" };
const SORTS = { finished_at: "time", reward: "reward", tokens: "length", staleness: "staleness", version: "version", step: "step", logprob: "log-prob", group_deviation: "difference in group", source: "source", status: "status", task_id: "task" };
const PAGE = 50;
const FILTERS = [...Object.keys(RANGES).flatMap((name) => [`min_${name}`, `max_${name}`]), ...Object.keys(CHOICES), "task_id", "group_id", "text", "where", "sort", "offset"];
const STATUS = { trained: "good", dropped: "drop", ready: "calm", leased: "calm", parked: "warn", demonstration: "accent", evaluation: "accent" };
const COLOURINGS = { logprob: "log-prob", advantage: "reward − group mean", gap: "teacher − engine", trainer: "trainer − engine", version: "version", mask: "who wrote it" };

let opened = null; // whether the person has opened or closed the filters


// The value of a reward as a colour, of the rewards that are shown.
const rewardChip = (reward) => {
  const kind = reward === null ? "" : reward >= 0.999 ? "good" : reward <= 0 ? "bad" : "warn";
  return pill(number(reward), `reward ${kind}`);
};

const filters = (now, choices) => {
  const to = (name) => (value) => change({ [name]: value, offset: "" });
  const range = (name, label) => {
    const end = (of) => input(`${of} ${label}`, now[`${of}_${name}`] ?? "", to(`${of}_${name}`), { type: "number", step: "any", placeholder: of });
    return make("div", { className: "field" }, make("span", { textContent: label }), make("div", { className: "ends" }, end("min"), end("max")));
  };
  const written = (name, label, placeholder) => {
    const made = field(label, input(label, now[name] ?? "", to(name), { type: "search", placeholder }));
    made.classList.add(`at-${name}`);
    return made;
  };
  const one = ([name, label]) => select(label, now[name] ?? "", [["", "all"], ...(choices[name] ?? [now[name]]).map((each) => [each, each])], to(name));
  const sort = now.sort ?? "-finished_at";
  const orders = Object.entries(SORTS).flatMap(([name, label]) => [[`-${name}`, `${label} ↓`], [name, `${label} ↑`]]);
  const fields = [
    written("text", "text", "in question or answer"),
    select("sort", sort, orders, to("sort")),
    ...Object.entries(CHOICES).filter(([name]) => choices[name]?.length || now[name]).map(one),
    ...Object.entries(RANGES).map(([name, label]) => range(name, label)),
    written("task_id", "task", "id"),
    written("where", "condition in SQL", "reward > 0.5 and tokens < 100"),
  ];
  const active = FILTERS.filter((name) => now[name] && !["sort", "offset"].includes(name));
  const all = make("details", { className: "filters" }, make("summary", { textContent: active.length ? `Filters (${active.length})` : "Filters" }), make("div", { className: "fields" }, ...fields));
  all.open = opened ?? (matchMedia("(min-width: 60rem)").matches && !now.id);
  all.firstChild.onclick = () => (opened = !all.open);
  const chips = active.map((name) =>
    make("button", { type: "button", className: "filter", onclick: () => to(name)(""), "aria-label": `Remove filter ${name}` }, `${name.replaceAll("_", " ")}: ${now[name]}`, make("b", { textContent: "×" })),
  );
  return [all, make("div", { className: "row chips" }, ...chips)];
};

const listed = (row, now) => {
  const open = () => change({ id: row.experience_id });
  const question = link({ ...now, id: row.experience_id }, make("span", { className: "asked", textContent: row.question ?? "" }), make("span", { className: "said", textContent: row.answer ?? row.error ?? "" }));
  const line = make(
    "tr",
    { onclick: (event) => event.target.closest("a") || open() },
    make("td", {}, rewardChip(row.reward)),
    make("td", {}, pill(row.drop_reason ?? row.group_status, STATUS[row.group_status])),
    make("td", { className: "num", textContent: number(row.step) }),
    make("td", { className: "num", textContent: number(row.tokens) }),
    make("td", { className: "num", textContent: number(row.staleness) }),
    make("td", { className: "num", textContent: number(row.version) }),
    make("td", { className: "what" }, question),
  );
  if (row.experience_id === now.id) line.className = "chosen";
  return line;
};

// State of the log, where it is not as it should be.
export const notices = (log) =>
  [
    log.problem,
    ...Object.entries(log.damaged ?? {}).map(([, problem]) => problem),
    log.lags ? `Reading the log: ${number(log.rows)} rows so far.` : "",
  ].filter(Boolean).map((textContent) => make("p", { className: textContent.startsWith("Reading") ? "notice" : "problem", textContent }));

const table = (found, now) => {
  const heads = ["reward", "group", "step", "tokens", "stale", "version", "question and answer"];
  const lines = found.rows.map((row) => listed(row, now));
  const first = Number(now.offset ?? 0);
  return [listing(heads, lines), pages("rows", first, lines.length, found.count, PAGE, (to) => change({ offset: to }))];
};

// One row

const fact = (name, ...value) => make("div", {}, make("dt", { textContent: name }), make("dd", {}, ...value));

const outcome = (row) => {
  if (row.group_status === "dropped") return row.drop_reason ? `dropped: ${row.drop_reason}` : "dropped; the log does not say why";
  if (row.group_status === "trained") return `trained in step ${row.step}`;
  return { ready: "waits for training", leased: "in the batch of a step", parked: "parked, unfinished", demonstration: "a demonstration", evaluation: "measured in an evaluation" }[row.group_status] ?? row.group_status;
};

const facts = (row, now) => {
  const became = row.step ? link({ view: "experiences", run: now.run, min_step: row.step, max_step: row.step }, outcome(row)) : outcome(row);
  const pairs = (of) => Object.entries(of).map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`).join(" · ");
  const late = row.late_feedback.map(({ reward, labels }) => `${reward ?? ""} ${pairs(labels)}`).join("; ");
  const seconds = row.times[1] - row.times[0];
  return make(
    "dl",
    { className: "facts" },
    fact("became", became),
    fact("used", `${row.uses ?? 0} times`),
    fact("reward", `${number(row.reward)} (${row.advantage === null ? "no group" : `${row.advantage >= 0 ? "+" : ""}${number(row.advantage)} to its group`})`),
    ...(Object.keys(row.components).length ? [fact("parts", pairs(row.components))] : []),
    ...(row.greedy_reward === null ? [] : [fact("greedy answer's reward", number(row.greedy_reward))]),
    ...(row.staleness === null ? [] : [fact("staleness", `${number(row.staleness)} steps`)]),
    fact("weights", row.versions.map(([start, end, version]) => `v${version}${row.versions.length > 1 ? ` for ${start}–${end}` : ""}`).join(", ") || "–"),
    fact("tokens", `${row.prompt_tokens === null ? "" : `${number(row.prompt_tokens)} prompt + `}${number(row.tokens)} model`),
    fact("ended by", row.stop_reason ?? "–"),
    fact("source", row.source, row.status === "finished" ? "" : `, ${row.status}`),
    fact("task", link({ view: "experiences", run: now.run, task_id: row.task_id }, row.task_id)),
    ...(seconds > 0 ? [fact("seconds", number(seconds))] : []),
    ...(Object.keys(row.labels).length ? [fact("labels", pairs(row.labels))] : []),
    ...(late ? [fact("feedback after training", late)] : []),
    ...(Object.keys(row.metrics).length ? [fact("metrics", pairs(row.metrics))] : []),
    ...(row.error ? [fact("reason", row.error)] : []),
  );
};

// A value of a token between `low` and `high` as a colour from bad over nothing to good.
const shade = (value, low, high) => {
  if (value === null || value === undefined || high <= low) return "";
  const share = Math.max(0, Math.min(1, (value - low) / (high - low)));
  const [tone, strength] = share < 0.5 ? ["--bad", 1 - 2 * share] : ["--good", 2 * share - 1];
  return `color-mix(in srgb, var(${tone}) ${Math.round(55 * strength)}%, transparent)`;
};

const tokens = (row, now) => {
  const versions = row.token_ids.map((_, at) => row.versions.find(([start, end]) => at >= start && at < end)?.[2] ?? null);
  const gaps = row.teacher_logprobs?.map((each, at) => each - row.logprobs[at]);
  const reward = (at) => row.token_rewards[at];
  const stepped = Object.keys(row.token_rewards).length > 0;
  const toGo = row.token_ids.map(() => 0); // the rewards inside the answer from a token on
  toGo.forEach((_, at) => Object.entries(row.token_rewards).forEach(([place, each]) => (toGo[at] += Number(place) >= at ? each : 0)));
  const known = [...new Set(versions.filter((each) => each !== null))].sort((a, b) => a - b);
  const least = Math.min(-0.01, ...row.logprobs);
  const values = {
    logprob: [(at) => row.logprobs[at], (at) => shade(row.logprobs[at] / Math.max(-least, 1) + 1, 0, 1.999)],
    advantage: stepped ? [(at) => toGo[at], (at) => shade(toGo[at], Math.min(0, ...toGo), Math.max(0, ...toGo))] : [() => row.advantage ?? null, () => shade(row.advantage, -1, 1)],
    gap: [(at) => gaps?.[at] ?? null, (at) => shade(gaps?.[at], -1, 1)],
    trainer: [(at) => row.trainer_gaps[at] ?? null, (at) => shade(row.trainer_gaps[at], -1, 1)],
    version: [(at) => versions[at], (at) => (versions[at] === null ? "" : `${colour(known.indexOf(versions[at]))}44`)],
    mask: [(at) => (row.mask[at] ? "model" : "given"), (at) => (row.mask[at] ? "var(--accent-soft)" : "")],
  };
  const mode = now.colour in values ? now.colour : "logprob";
  const [value, paint] = values[mode];
  const readout = make("span", { className: "readout", textContent: "Point at a token." });
  const strip = make("div", { className: "tokens", "aria-label": "Tokens" });
  row.token_ids.forEach((id, at) => {
    const shown = (row.token_texts?.[at] ?? `${id} `).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥");
    const token = make("span", { className: row.mask[at] ? "own" : "given", textContent: shown });
    if (row.mask[at]) token.style.background = paint(at);
    token.dataset.at = at;
    strip.append(token);
  });
  strip.addEventListener("pointerover", ({ target }) => {
    const at = Number(target.dataset?.at ?? NaN);
    if (Number.isNaN(at)) return;
    const parts = [`token ${at}: id ${row.token_ids[at]}`];
    if (row.mask[at]) parts.push(`log-prob ${number(row.logprobs[at])} (p ${percent(Math.exp(row.logprobs[at]))})`);
    if (versions[at] !== null) parts.push(`v${versions[at]}`);
    if (mode === "gap" || mode === "trainer") parts.push(`${mode === "gap" ? "teacher" : "trainer"} ${number(value(at))}`);
    if (mode === "advantage" && stepped) parts.push(`reward to go ${number(toGo[at])}`);
    if (reward(at) !== undefined) parts.push(`reward ${number(reward(at))}`);
    readout.textContent = parts.join(" · ");
  });
  const measured = Object.keys(row.trainer_gaps).length > 0;
  const names = Object.entries(COLOURINGS).filter(([name]) => (name !== "gap" || gaps) && (name !== "trainer" || measured)).map(([name, label]) => [name, name === "advantage" && stepped ? "reward to go" : label]);
  const more = row.token_count > row.token_ids.length ? `, the first ${number(row.token_ids.length)} of ${number(row.token_count)}` : "";
  const none = row.token_texts ? "" : " The model's tokenizer is not on this machine, so ids are shown.";
  const meaning = mode === "advantage" && !stepped ? " Its advantage in training may differ: algorithms divide the difference, or take it from a critic." : "";
  const notice = measured ? "" : " The gap of engine and trainer is known by token for the row of each step in which it is widest.";
  return make(
    "section",
    { className: "strip" },
    make("div", { className: "controls" }, make("h2", { textContent: `Tokens${more}` }), select("colour", mode, names, (chosen) => changeHere({ colour: chosen })), readout),
    strip,
    make("p", { className: "soft", textContent: `Faint tokens were given, the model wrote the others.${none}${notice}${meaning}` }),
  );
};

const siblings = (row, now) => {
  if (row.group.length < 2) return "";
  const cards = row.group.map((each, at) => {
    const body = make("div", { className: "body" }, ...text(each.text));
    const head = make("div", { className: "title" }, rewardChip(each.reward), soft(`#${at} · ${number(each.tokens)} tokens`));
    const card = link({ ...now, id: each.experience_id }, head, body);
    card.className = each.experience_id === row.experience_id ? "sibling chosen" : "sibling";
    return card;
  });
  const rewards = row.group.map(({ reward }) => reward).filter((each) => each !== null);
  const same = rewards.length > 1 && rewards.every((each) => each === rewards[0]) ? ": all rewards are equal, so it teaches nothing" : "";
  return make("section", {}, make("h2", { textContent: `Its group of ${row.group.length}${same}` }), make("div", { className: "group" }, ...cards));
};

const TOOLS = { tool: "Tool", observation: "Observation" };

const trajectory = (row, now) => {
  const turns = row.turns.map(({ role = "", content = "", ...rest }) => {
    const shown = turn({ role: TOOLS[role] ?? role, content: content ?? "" });
    if (role === "user") shown.classList.add("user");
    if (role === "assistant") shown.querySelector(".role").textContent = "Model";
    for (const [name, value] of Object.entries(rest)) shown.append(make("p", { className: "role", textContent: name }), make("pre", { textContent: String(value) }));
    return shown;
  });
  const images = Array.from({ length: row.image_count }, (_, at) => picture(new URLSearchParams({ run: now.run, id: row.experience_id, number: at }), `Image ${at + 1}`));
  return make("section", { className: "turns" }, ...turns, ...images);
};

const detail = async (now, drawer, current) => {
  drawer.hidden = !now.id;
  document.body.classList.toggle("with-drawer", Boolean(now.id));
  if (!now.id) return drawer.replaceChildren();
  const close = make("button", { type: "button", className: "quiet", textContent: "×", "aria-label": "Close", onclick: () => change({ id: "" }) });
  const bar = make("div", { className: "title" }, make("h1", { textContent: now.id, title: now.id }), close);
  try {
    const row = await query("row", { run: now.run, id: now.id });
    if (!current()) return;
    const top = drawer.dataset.id === now.id ? drawer.scrollTop : 0;
    drawer.replaceChildren(bar, facts(row, now), trajectory(row, now), row.token_ids.length ? tokens(row, now) : "", siblings(row, now));
    drawer.dataset.id = now.id;
    drawer.scrollTop = top;
  } catch (error) {
    if (current()) drawer.replaceChildren(bar, make("p", { className: "problem", textContent: error.message }));
  }
};

export const draw = async (now, main, current) => {
  const drawer = document.getElementById("drawer");
  const shown = detail(now, drawer, current);
  try {
    const found = await query("rows", { run: now.run, limit: PAGE, ...pick(now, FILTERS) });
    if (!current()) return;
    const { reward, groups, tokens: length, staleness } = found.means;
    const mean = `${number(found.count)} rows in ${number(groups)} groups · mean reward ${number(reward)} · ${number(length)} tokens · staleness ${number(staleness)}`;
    main.replaceChildren(...notices(found.log), ...filters(now, found.log.choices ?? {}), make("p", { className: "mean", textContent: mean }), ...table(found, now));
  } catch (error) {
    if (!current()) return;
    main.replaceChildren(make("p", { className: "problem", textContent: error.message }), ...filters(now, {}));
  }
  await shown;
};
