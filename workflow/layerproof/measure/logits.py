"""How well two models' logits agree, in terms that a user of the model would notice."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerproof.tensors.tensor import Tensor

TOP_K = 5
CHUNK_ELEMENTS = 1 << 20


def compare_logits(port: Tensor, golden: Tensor, valid: np.ndarray) -> dict[str, Any] | None:
    """Compares logits [batch, seq, vocabulary] at the tokens that `valid` [batch, seq] marks, in fp64.

    Returns None if the shapes differ, if no token is valid or if a logit is not finite; otherwise
        kl: {mean, max} of KL(golden || port) in nats
        top_k: {k, shared}, where shared is the mean share of the golden's TOP_K tokens that are also in the port's
        argmax: share of positions where both sides predict the same most likely token
        greedy: the token that each side would generate after each prompt, and whether all of them are equal
    """
    if port.shape != golden.shape or not valid.any():
        return None
    divergences, shared, equal = [], [], []
    greedy: dict[str, list[int]] = {"golden": [], "port": []}
    step = max(1, CHUNK_ELEMENTS // port.shape[-1])
    for row in range(port.shape[0]):
        positions = np.flatnonzero(valid[row])
        best: dict[str, int] = {}
        for start in range(0, len(positions), step):
            chosen = positions[start : start + step]
            span = slice(int(chosen[0]), int(chosen[-1]) + 1)
            keep = chosen - chosen[0]
            mine = port.floats(np.asarray(port.data[row, span]))[keep].astype(np.float64)
            wanted = golden.floats(np.asarray(golden.data[row, span]))[keep].astype(np.float64)
            if not (np.isfinite(mine).all() and np.isfinite(wanted).all()):
                return None
            log_mine, log_wanted = _log_softmax(mine), _log_softmax(wanted)
            divergences.append((np.exp(log_wanted) * (log_wanted - log_mine)).sum(-1))
            count = min(TOP_K, mine.shape[-1])
            top_mine, top_wanted = (np.argpartition(-part, count - 1)[:, :count] for part in (mine, wanted))
            shared.append((top_mine[:, :, None] == top_wanted[:, None, :]).any(1).mean(-1))
            equal.append(mine.argmax(-1) == wanted.argmax(-1))
            best = {"golden": int(wanted[-1].argmax()), "port": int(mine[-1].argmax())}
        for side, token in best.items():
            greedy[side].append(token)
    kl = np.concatenate(divergences)
    return {
        "kl": {"mean": float(kl.mean()), "max": float(kl.max())},
        "top_k": {"k": TOP_K, "shared": float(np.concatenate(shared).mean())},
        "argmax": float(np.concatenate(equal).mean()),
        "greedy": {**greedy, "equal": greedy["golden"] == greedy["port"]},
    }


def _log_softmax(values: np.ndarray) -> np.ndarray:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
