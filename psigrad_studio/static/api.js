// Questions to the server of this page. A refusal is an Error whose message is meant for people.

const token = document.querySelector('meta[name="csrf"]').content;

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
    return await fetch(path, { ...options, credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The studio does not answer; is `psigrad studio` still running in its terminal?");
  }
}

const asked = async (path, options) => answered(await fetched(path, options));

/** GET, as an object. */
export const get = (path, signal) => asked(path, { signal });

const posted = (content, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json", "x-psigrad-csrf": token },
  body: JSON.stringify(content),
  signal,
});

/** POST of an object as JSON, answered by an object. */
export const post = (path, content, signal) => asked(path, posted(content, signal));

/** POST that is answered by server-sent events: their data, as objects, one after the other. */
export async function* events(path, content, signal) {
  const response = await fetched(path, posted(content, signal));
  if (!response.ok) await answered(response);
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
