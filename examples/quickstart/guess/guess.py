"""A harness with a loop: the model guesses a number and hears "higher" or "lower", four times at most."""

import json
import os
import re
import urllib.request

SECRET, messages = 37, [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]


def ask() -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["POLAR_MODEL"], "messages": messages, "max_tokens": 32}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"]["content"] or ""


guesses = []
for _ in range(4):
    said = ask()
    numbers = [int(n) for n in re.findall(r"\d{1,6}", said)]
    guesses.append(numbers[0] if numbers else None)
    if guesses[-1] == SECRET:
        break
    hint = "I saw no number." if not numbers else "Higher." if numbers[0] < SECRET else "Lower."
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint + " Guess again."}]
print(json.dumps(guesses))
