// What the page keeps in the browser, and how it asks the server: what is typed is stored at once, and what is saved
// stays in an outbox until the server has acknowledged it.

import { read, write } from "./base.js";

export { ask, me, Refused, takeKey, Unreachable } from "./base.js";

export const view = () => read("view", "one");
export const setView = (value) => write("view", value);
export const savesAtOnce = () => read("at once", false);
export const setSavesAtOnce = (value) => write("at once", value);

export const emptyDraft = () => ({
  score: null,
  thumb: null,
  ranking: [],
  tie: false,
  edit: null,
  aside: null, // an edit that is not sent but can be continued
  labels: [],
  comment: "",
});
const isEmpty = (draft) => JSON.stringify(draft) === JSON.stringify(emptyDraft());
export const draft = (item) => ({ ...emptyDraft(), ...read(`draft:${item}`, {}) });
export const hasDraft = (item) => !isEmpty(draft(item));
export const setDraft = (item, value) => write(`draft:${item}`, isEmpty(value) ? null : value);

export const outbox = () => read("outbox", []);
export const post = (judgement) => write("outbox", [...outbox(), judgement]);
export const unpost = (id) => write("outbox", outbox().filter((each) => each.id !== id));
export const returned = () => read("returned", []);
export const giveBack = (judgement, why) => write("returned", [...returned(), { ...judgement, why }]);

// randomUUID is there on secure origins only.
export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
