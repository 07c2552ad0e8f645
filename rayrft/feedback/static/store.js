// What the page keeps in the browser, and how it asks the server: what is typed is stored at once, and what is saved
// stays in an outbox until the server has acknowledged it.

const base = location.pathname;
const key = (name) => `rayrft:${base}:${name}`;

const read = (name, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(key(name))) ?? otherwise;
  } catch {
    return otherwise;
  }
};
const write = (name, value) => {
  if (value === null) localStorage.removeItem(key(name));
  else localStorage.setItem(key(name), JSON.stringify(value));
};

export const me = () => read("me", { person: "", key: "" });
export const setMe = (value) => write("me", value);
export const view = () => read("view", "one");
export const setView = (value) => write("view", value);
export const savesAtOnce = () => read("at once", false);
export const setSavesAtOnce = (value) => write("at once", value);

// A link may bring the key, behind '#', which is not sent to servers; it is taken from the address at once.
export const takeKey = () => {
  const found = new URLSearchParams(location.hash.slice(1)).get("key");
  if (found) {
    setMe({ ...me(), key: found });
    history.replaceState(null, "", base);
  }
};

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

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Unreachable extends Error {}

// A request that takes longer is made again: each has the same effect however often it is made.
const LIMIT_MS = 15_000;

export const ask = async (path, body, options = {}) => {
  let response;
  try {
    response = await fetch(`${base}v1/${path}`, {
      method: body === undefined ? "GET" : "POST",
      headers: { Authorization: `Bearer ${me().key}`, "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(LIMIT_MS),
      ...options,
    });
  } catch (error) {
    throw new Unreachable(String(error));
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  // What Serve says while the page's process is away, and what passes.
  if (response.status >= 500 || response.status === 429 || !answer.error) throw new Unreachable(`${response.status}`);
  throw new Refused(response.status, answer.error.message);
};

export const image = async (item, number) => {
  const query = new URLSearchParams({ item, number });
  const headers = { Authorization: `Bearer ${me().key}` };
  const response = await fetch(`${base}v1/image?${query}`, { headers, signal: AbortSignal.timeout(LIMIT_MS) });
  return response.ok ? URL.createObjectURL(await response.blob()) : null;
};
