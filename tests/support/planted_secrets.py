"""Secrets that tests plant, the settings that may hold them, and the files of a folder in which they are found."""

from __future__ import annotations

PLANTED = {
    "variable": "correct-horse-71",
    "url": "hunter2pass",
    "query": "q9w8e7r6t5",
    "key": "plain_key_value",
    "token": "hf_" + "Ab1" * 12,
    "bearer": "abcdef0123456789",
    "flag": "flagged-value",
}

CHANNELS = {
    "data": {"dataset": f"https://me:{PLANTED['url']}@data.example/a.jsonl?X-Amz-Credential={PLANTED['query']}"},
    "teacher": f"https://{PLANTED['url']}@teacher.example/v1",
    "tools": [f"mcp:env OPENAI_KEY={PLANTED['key']} python shop.py --api-key '{PLANTED['flag']}'",
              f"mcp:https://h/?key={PLANTED['query']}"],
    "environment": f"openenv:wss://me:{PLANTED['url']}@play.example",
    "env_kwargs": {"args": ["serve", "--auth-token", PLANTED["flag"], "-password", PLANTED["flag"], 3],
                   "env": {"DB_PASS": PLANTED["key"], "GITHUB_PAT": PLANTED["key"], "HTTP_AUTH": PLANTED["key"]},
                   "headers": {"Authorization": f"Bearer {PLANTED['bearer']}", "X-Api-Key": PLANTED["key"]}},
    "model": {"hub_token": PLANTED["token"], "path": f"https://hf.co/m?token={PLANTED['query']}"},
    "notes": f"MLFLOW_TRACKING_URI=https://me:{PLANTED['url']}@mlflow.example HF_TOKEN={PLANTED['token']} {PLANTED['variable']}",
}  # fmt: skip


def found_in(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 4
    contents = {path: path.read_bytes() for path in files}
    return {(name, path.name) for path, text in contents.items() for name, value in PLANTED.items() if value.encode() in text}
