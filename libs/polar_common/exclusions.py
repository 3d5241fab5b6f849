"""Why a completion isn't trained: what each reason that a build tells means, in words."""

from __future__ import annotations

__all__ = ["MEANINGS", "meaning"]

MEANINGS = {
    "aborted": "its caller went away, or the engine broke off, before the answer was whole",
    "adopted_partial": "broken off, yet the harness went on with what had arrived: it stands as context",
    "cancelled": "its session was cancelled",
    "dead_attempt": "of an attempt that was lost; another attempt took its place",
    "empty": "nothing was sampled",
    "engine_retokenised": "the engine reported other prompt ids than it was sent",
    "greedy": "sampled at a temperature near 0",
    "harness_error": "its session's harness failed: that says nothing about the model",
    "infra_error": "its session ended by a fault of the house",
    "invalid_logprobs": "a log-prob is missing or no number",
    "late": "captured after the attempt was sealed",
    "length_mismatch": "the engine gave more or fewer log-probs than ids",
    "logit_bias": "sampled with a logit bias: the log-probs aren't the policy's",
    "max_length": "cut off where the trace would have been longer than the rules allow",
    "min_tokens": "its trace has fewer sampled tokens than the rules ask for",
    "mixed_policy": "sampled by an older policy than the rest of its trace",
    "no_logprobs": "the engine gave no log-probs",
    "no_token_ids": "the engine gave no ids",
    "other_policy": "trained in a trace of its own policy version",
    "penalties": "sampled with penalties: the log-probs aren't the policy's",
    "raw_logprobs": "the engine's log-probs are those before the temperature was applied",
    "replay": "a recorded answer, delivered again to a retry",
    "sampled_elsewhere": "trained in another trace; here it is context",
    "side": "a call beside the work, such as a title or a summary that nobody read: no tools, never gone on with",
    "subagent": "of a sub-agent, and the rules leave those out",
    "superseded_retry": "asked again, and the harness went on with another answer",
    "undelivered": "the answer never reached the harness",
    "unused_parallel": "one of several answers at once, and the harness went on with another",
}


def meaning(reason: str) -> str:
    """Empty for a reason of a user's own rules or of a newer version."""
    return MEANINGS.get(reason, "")
