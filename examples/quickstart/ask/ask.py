"""A harness of ten lines: one question, one answer on standard output."""

import json
import os
import urllib.request

body = {"model": os.environ["POLAR_MODEL"], "messages": [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({**body, "max_tokens": 48}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"]["content"])
