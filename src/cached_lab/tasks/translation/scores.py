"""BLEU and chrF of translations by sacrebleu (Post, arXiv:1804.08771), with signatures and bootstrap intervals.

`bleu` is sacreBLEU with its own tokenisation; sacremoses first joins data in Moses tokens. `tokenised_bleu` is computed
on lower-cased Moses tokens, as fairseq prints it and papers on IWSLT and Multi30k report it. It depends on the
tokeniser and is not comparable with `bleu`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cached_transformers.extras import require

RESAMPLES = 1000


def corpus_scores(
    hypotheses: Sequence[str], references: Sequence[str], language: str, text_format: str, resamples: int = 0
) -> dict[str, Any]:
    """Return {bleu, chrf, tokenised_bleu} in 0..100; with `resamples` also signatures, and 95 % intervals of BLEU.

    Args:
        language: of both, for the rules of Moses. text_format: "raw" or "moses".

    Raises:
        ImportError: sacrebleu or sacremoses is not installed.
        ValueError: different numbers of lines, or none.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} translations for {len(references)} references; give one each, and some")
    metrics = require("sacrebleu.metrics", extra="language")
    moses = require("sacremoses", extra="language")
    tokens = [list(hypotheses), list(references)]
    texts = tokens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sacremoses takes English rules for a language without its own
        if text_format == "moses":
            joiner = moses.MosesDetokenizer(lang=language)
            texts = [[joiner.detokenize(line.split(" ")) for line in side] for side in tokens]
        else:
            splitter = moses.MosesTokenizer(lang=language)
            tokens = [[splitter.tokenize(line, return_str=True) for line in side] for side in tokens]
    found: dict[str, Any] = {}
    kinds = (
        ("bleu", metrics.BLEU(), texts),
        ("chrf", metrics.CHRF(), texts),
        ("tokenised_bleu", metrics.BLEU(lowercase=True, tokenize="none", force=True), tokens),
    )
    for name, metric, (said, wanted) in kinds:
        # sacrebleu 2.6 cannot average resamples of chrF, which mix two number types.
        drawn = resamples if name != "chrf" else 0
        score = metric.corpus_score(said, [wanted], n_bootstrap=max(1, drawn))
        if drawn:
            found[f"{name}_interval"] = [float(score._mean - score._ci), float(score._mean + score._ci)]
        if resamples:
            found[f"{name}_signature"] = str(metric.get_signature())
        found[name] = float(score.score)
    order = ("bleu", "chrf", "tokenised_bleu")
    return {key: found[key] for key in (*order, *(k for k in found if k not in order))}
