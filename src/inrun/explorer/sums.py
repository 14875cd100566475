"""SQL that turns sums per label and sample into scores: one row per sample, with columns of every validation set.

The same formulas as in :mod:`inrun.ledger.scores`; the order in which doubles are added is not fixed here, so last bits may differ.
"""

# ruff: noqa: S608 - queries are put together from our own pieces

from __future__ import annotations

#: What is known of a sample's score for one set; column ``NAME_K`` is that of set K.
MEASURES = {
    "score": "DOUBLE",
    "standard_error": "DOUBLE",
    "estimate_error": "DOUBLE",
    "step_score": "DOUBLE",
    "times_used": "BIGINT",
    "pending": "BIGINT",
    "first_step": "BIGINT",
    "last_step": "BIGINT",
}


def wide_scores(schema: str, sets: list[list[str]], whole: bool, touched: str | None = None) -> str:
    """Return SQL of the scores of all samples, or of those in the table ``touched``.

    Args:
        schema: Of the run; it has the tables ``sums``, ``open_sums`` and ``labels`` (label, place: the number of its set, k: how
            many labels that set has).
        sets: The labels of every set; only how many there are matters here.
        whole: Whether the run keeps whole credit.
        touched: A table of sample ids.
    """
    some = f" WHERE sample_id IN (SELECT sample_id FROM {touched})" if touched else ""
    rows = f"SELECT * FROM {schema}.sums{some} UNION ALL SELECT * FROM {schema}.open_sums{some}"
    by_label = f"""
        SELECT label, sample_id, sum(f) AS f, sum(u) AS u, sum(o) AS o, sum(e) AS e, sum(p) AS p, min(lo) AS lo, max(hi) AS hi
        FROM ({rows}) GROUP BY 1, 2"""
    # Squares about the mean over all k folds, of which `n` have a sum and the others count as 0; without a difference of squares.
    square = "n * spread + n * (middle - score) ** 2 + (k - n) * score ** 2"
    by_set = f"""
        SELECT place, sample_id, any_value(k) AS k, sum(f) / any_value(k) AS score, count(*) AS n, var_pop(f) AS spread,
               avg(f) AS middle, sum(o) / any_value(k) AS own, sum(e) / any_value(k) AS e, count(e) AS estimated,
               max(u)::BIGINT AS times_used, max(p)::BIGINT AS pending, min(lo) AS first_step, max(hi) AS last_step
        FROM ({by_label}) JOIN {schema}.labels USING (label) GROUP BY 1, 2"""
    own = "coalesce(own, 0.0)" if whole else "score"
    long = f"""
        SELECT place, sample_id, score, CASE WHEN k > 1 THEN sqrt(({square}) / (k - 1)) / sqrt(k::DOUBLE) END AS standard_error,
               CASE WHEN estimated = k THEN sqrt(e) END AS estimate_error, {own} AS step_score,
               times_used, pending, first_step, last_step
        FROM ({by_set})"""
    picked = ", ".join(f"max({name}) FILTER (place = {place}) AS {name}_{place}" for place in range(len(sets)) for name in MEASURES)
    return (
        f"SELECT sample_id, {picked} FROM ({long}) GROUP BY sample_id" if sets else "SELECT NULL::BIGINT AS sample_id WHERE false"
    )


def score_columns(sets: int) -> list[str]:
    """Return the names of the score columns, in order."""
    return [f"{name}_{place}" for place in range(sets) for name in MEASURES]
