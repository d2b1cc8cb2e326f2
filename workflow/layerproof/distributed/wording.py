"""Words for people."""

from collections.abc import Iterable, Mapping


def listed(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 3`, or `ranks 0 to 6 and 9`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if run[3:] else map(str, run))]
    *most, last = parts
    if most:
        return f"ranks {', '.join(most)} and {last}"
    return f"{'ranks' if ' ' in last else 'rank'} {last}"


def capital(text: str) -> str:
    """The same with a capital letter at the beginning."""
    return text[:1].upper() + text[1:]


def by_value(values: Mapping[int, object], one: str, several: str) -> str:
    """`ranks 0 and 1 look at a; rank 2 looks at b`, with the verb for one rank and for several."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(str(values[rank]), []).append(rank)
    return "; ".join(f"{listed(of)} {several if of[1:] else one} {value}" for value, of in ranks.items())
