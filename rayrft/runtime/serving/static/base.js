// What all pages share: elements, text of a model, what the browser keeps, and how a page asks its server.

// Elements. Text of a model is only put on a page as text.

export const make = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
};

export const keycap = (name) => make("kbd", { textContent: name });

export const text = (content) => {
  const parts = content.split(/```[^\n`]*\n([\s\S]*?)(?:```|$)/);
  return parts
    .map((part, at) => {
      if (at % 2) return make("pre", {}, make("code", { textContent: part.replace(/\n$/, "") }));
      const trimmed = part.replace(/^\n+|\n+$/g, "");
      return trimmed ? make("p", { className: "text", textContent: trimmed }) : null;
    })
    .filter(Boolean);
};

const ROLES = { user: "Question", assistant: "Model", system: "Instructions", tool: "Tool" };

export const turn = ({ role, content }, named = true) => {
  const body = make("div", { className: "body" }, ...text(content));
  if (role === "system") {
    return make("details", { className: "turn" }, make("summary", { textContent: ROLES.system }), body);
  }
  const element = make("div", { className: `turn ${role === "user" ? "user" : ""}` });
  if (named) element.append(make("p", { className: "role", textContent: ROLES[role] ?? role }));
  element.append(body);
  return element;
};

// What the browser keeps

export const base = location.pathname;
// The viewer's page and the run, where this one is below it.
export const [, above, run] = base.match(/^(.*\/)feedback\/([^/]+)\/$/) ?? [];
const key = (name, of = base) => `rayrft:${of}:${name}`;

export const read = (name, otherwise, of) => {
  try {
    return JSON.parse(localStorage.getItem(key(name, of))) ?? otherwise;
  } catch {
    return otherwise;
  }
};
export const write = (name, value) => {
  if (value === null) localStorage.removeItem(key(name));
  else localStorage.setItem(key(name), JSON.stringify(value));
};

export const me = () => read("me", { person: "", key: "" });
export const setMe = (value) => write("me", value);

// A link may bring the key, behind '#', which is not sent to servers; it is taken from the address at once. The page
// below the viewer has the viewer's.
export const takeKey = () => {
  const found = new URLSearchParams(location.hash.slice(1)).get("key") ?? (above && read("me", {}, above).key);
  if (found) {
    setMe({ ...me(), key: found });
    history.replaceState(null, "", base + location.search);
  }
};

// Asks for the key, and for a name where pages have `title` and `lead` for it; all calls wait for one dialog.
let entering = null;
export const login = (problem, { title = "Key", lead, named = false }) => {
  entering ??= new Promise((done) => {
    const { person, key: known } = me();
    const name = make("input", { id: "login-name", autocomplete: "username", maxLength: 64, required: named, value: person });
    const secret = make("input", { id: "login-key", type: "password", autocomplete: "current-password", required: !named, value: problem ? "" : known });
    const form = make(
      "form",
      { method: "dialog" },
      make("h2", { id: "login-title", textContent: title }),
      make("p", { textContent: lead }),
      ...(named ? [make("label", {}, "Name ", name)] : []),
      make("label", {}, "Key ", secret),
      make("p", { id: "login-problem", role: "alert", textContent: problem }),
      make("button", { type: "submit", className: "primary", textContent: "Open" }),
    );
    const dialog = make("dialog", { id: "login", "aria-labelledby": "login-title", oncancel: (event) => event.preventDefault() }, form);
    form.onsubmit = () => {
      setMe({ person: name.value.trim(), key: secret.value.trim() });
      entering = null;
      dialog.remove();
      done();
    };
    document.body.append(dialog);
    dialog.showModal();
    (named && !person ? name : secret).focus();
  });
  return entering;
};

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
  if (response.status >= 500 || response.status === 429 || !answer.error) {
    throw new Unreachable(answer.error?.message ?? `${response.status}`);
  }
  throw new Refused(response.status, answer.error.message);
};

// An image of the server, by a query; a sentence in its place if it cannot be shown.
export const picture = (query, name) => {
  const shown = make("img", { alt: name });
  const fetched = async () => {
    const headers = { Authorization: `Bearer ${me().key}` };
    const response = await fetch(`${base}v1/image?${query}`, { headers, signal: AbortSignal.timeout(LIMIT_MS) });
    if (response.ok) shown.src = URL.createObjectURL(await response.blob());
    else shown.replaceWith(`${name} is not there.`);
  };
  fetched().catch(() => shown.replaceWith(`${name} cannot be fetched.`));
  shown.onload = () => URL.revokeObjectURL(shown.src);
  return shown;
};
