"""The preference losses. Their default values come from their papers or from TRL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from psigrad.objective.catalog import Catalog
from psigrad.objective.preferences.preference_loss import (
    KahnemanTversky,
    OnlinePreference,
    Preference,
    apo_down,
    apo_zero,
    bco_pair,
    hinge,
    log_odds,
    log_ratio,
    logistic,
    mean_log_ratio,
    mean_logp,
    nca_pair,
    robust,
    sppo_hard,
    squared,
)

METHODS: Catalog[Preference | KahnemanTversky] = Catalog()

DPO = METHODS.declare("dpo", "direct preference optimisation", Preference(log_ratio, logistic(), beta=0.1))
CDPO = METHODS.declare("cdpo", "DPO that assumes that 10 % of labels are swapped", replace(DPO, link=logistic(0.1)))
ROBUST_DPO = METHODS.declare("robust_dpo", "DPO with a loss that swapped labels do not bias", replace(DPO, link=robust(0.1)))
# This is TRL's form, per token. The paper's form sums over tokens: replace(IPO, score=log_ratio).
IPO = METHODS.declare(
    "ipo", "squared loss with a finite optimum even if all labels of a pair agree", Preference(mean_log_ratio, squared, beta=0.1)
)
HINGE = METHODS.declare("hinge", "DPO with a hinge loss, as in SLiC", replace(DPO, link=hinge))
LN_DPO = METHODS.declare("ln_dpo", "DPO per token: length-normalised", replace(DPO, score=mean_log_ratio, beta=2.0))
SIMPO = METHODS.declare(
    "simpo", "length-normalised log-probs and a margin, no reference", Preference(mean_logp, logistic(), beta=2.0, margin=1.0)
)
# beta is 1, as the log-odds enter unscaled. lambda weights them against the likelihood.
ORPO = METHODS.declare(
    "orpo",
    "likelihood of the chosen plus an odds ratio, no reference",
    Preference(log_odds, logistic(), beta=1.0, sft=1.0, preference=0.1),
)
APO_ZERO = METHODS.declare("apo_zero", "raises the chosen, lowers the rejected", replace(DPO, link=apo_zero))
APO_DOWN = METHODS.declare("apo_down", "lowers both, the rejected more", replace(DPO, link=apo_down))
KTO = METHODS.declare("kto", "completions labelled good or bad, without pairs", KahnemanTversky())

# The names that the settings `score` and `link` accept. The last three links have no method of their own.
PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "score": (log_ratio, mean_log_ratio, mean_logp, log_odds),
    "link": (logistic, robust, hinge, squared, apo_zero, apo_down, bco_pair, nca_pair, sppo_hard),
}

ONLINE_METHODS: Catalog[OnlinePreference] = Catalog()
ONLINE_DPO = ONLINE_METHODS.declare(
    "online_dpo", "preference loss on the best and worst completion of each group", OnlinePreference(DPO)
)
