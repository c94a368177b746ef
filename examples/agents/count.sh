#!/usr/bin/env bash
# The counting agent of docs/agents.md as a shell script: --agent-command "bash examples/agents/count.sh"
# curl sends the requests. Python keeps the messages as JSON, since a shell variable would lose line breaks at the end of a text.
set -euo pipefail
IFS= read -r row
session=$(python3 -c 'import json, sys; row = json.loads(sys.argv[1]); print(json.dumps([row["prompt"], row["start"], 0]))' "$row")
for _ in 1 2 3; do
  body=$(python3 -c 'import json, sys; print(json.dumps({"model": "policy", "messages": json.loads(sys.argv[1])[0]}))' "$session")
  answer=$(curl -sS --fail-with-body --noproxy '*' "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d "$body")
  session=$(python3 -c '
import json, sys
(messages, last, right), answer = map(json.loads, sys.argv[1:])
number = answer["choices"][0]["message"]["content"]
messages += [{"role": "assistant", "content": number}, {"role": "user", "content": "more"}]
print(json.dumps([messages, number, right + (len(number) == 1 and number > last)]))' "$session" "$answer")
done
python3 -c 'import json, sys; print(json.loads(sys.argv[1])[2] / 3)' "$session"
