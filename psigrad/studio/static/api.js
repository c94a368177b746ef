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

async function asked(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The studio does not answer; is `psigrad studio` still running in its terminal?");
  }
  return answered(response);
}

/** GET, as an object. */
export const get = (path, signal) => asked(path, { signal });

/** POST of an object as JSON, answered by an object. */
export const post = (path, content, signal) =>
  asked(path, {
    method: "POST",
    headers: { "content-type": "application/json", "x-psigrad-csrf": token },
    body: JSON.stringify(content),
    signal,
  });
