"""Reward for the guessing game: 1 for the number itself, else how near the best guess came, at most 0.9."""

import json
import os

guesses = [g for g in json.loads(os.environ.get("POLAR_ANSWER") or "[]") if g is not None]
best = min((abs(g - 37) for g in guesses), default=100)
reward = 1.0 if best == 0 else round(max(0.0, 0.9 - best / 50), 3)
with open("reward.json", "w") as file:
    json.dump({"reward": reward}, file)
raise SystemExit(0 if best == 0 else 1)
