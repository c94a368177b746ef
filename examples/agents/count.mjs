// The counting agent of docs/agents.md in JavaScript, without dependencies: --agent-command "node examples/agents/count.mjs"
import { readFileSync } from "node:fs";

const row = JSON.parse(readFileSync(0, "utf8"));
const { OPENAI_BASE_URL: url, OPENAI_API_KEY: key } = process.env;
const messages = [...row.prompt];
let last = row.start;
let right = 0;
for (let turn = 0; turn < 3; turn++) {
  const answer = await fetch(`${url}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify({ model: "policy", messages }),
  });
  if (!answer.ok) throw new Error(await answer.text());
  const number = (await answer.json()).choices[0].message.content;
  right += number.length === 1 && number > last ? 1 : 0;
  last = number;
  messages.push({ role: "assistant", content: number }, { role: "user", content: "more" });
}
console.log(right / 3);
