// Requests to this page's server. A refused request throws an Error whose message is shown to the user.
import { el } from "./dom.js";

const SESSION = "psigrad-session";

/** Store the token of a new session where only pages from this port can read it. Without local storage nobody can log in. */
export const keepSession = (token) => localStorage.setItem(SESSION, token);

async function answered(response) {
  const type = response.headers.get("content-type") ?? "";
  const body = type.startsWith("application/json") ? await response.json() : null;
  if (response.ok && body !== null) return body;
  const error = new Error(body?.error?.message ?? `The studio answered ${response.status}.`);
  error.code = body?.error?.code ?? "unknown";
  error.status = response.status;
  throw error;
}

async function fetched(path, options) {
  try {
    const headers = { ...options.headers, "x-psigrad-csrf": localStorage.getItem(SESSION) ?? "" };
    return await fetch(path, { ...options, headers, credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The studio does not answer; is `psigrad studio` still running in its terminal?");
  }
}

const asked = async (path, options) => answered(await fetched(path, options));

/** Send a GET request, and return the JSON answer as an object. */
export const get = (path, signal) => asked(path, { signal });

const posted = (content, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(content),
  signal,
});

/** POST an object as JSON, and return the JSON answer as an object. */
export const post = (path, content, signal) => asked(path, posted(content, signal));

export const pause = (milliseconds) => new Promise((ready) => setTimeout(ready, milliseconds));

/** Return the result of `ask`. After an error that `passing` accepts, ask again, after each of the `waits` in milliseconds. */
export async function persistently(ask, waits, passing) {
  for (const wait of waits) {
    try {
      return await ask();
    } catch (error) {
      if (!passing(error)) throw error;
      await pause(wait);
    }
  }
  return ask();
}

async function file(path) {
  const response = await fetched(path, {});
  if (!response.ok) await answered(response);
  return response;
}

/** Fetch a picture, and return the URL of an object in this page. */
export const picture = async (path) => URL.createObjectURL(await (await file(path)).blob());

/** Download a file under the name that the server gives. */
export async function download(path) {
  const response = await file(path), url = URL.createObjectURL(await response.blob());
  const name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1] ?? "";
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Yield the data of server-sent events as objects, in answer to a POST, or to a GET without `content`. */
export async function* events(path, content, signal, opened = () => {}) {
  const response = await fetched(path, content === undefined ? { signal } : posted(content, signal));
  if (!response.ok) await answered(response);
  opened();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
  }
}
