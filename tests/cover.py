"""Which tests come with each change: the cheapest that reach nearly every place which any test reaches.

    SHARDWISE_TESTS_TURN=all python -m tests.mutants reach --folder F --number 0 --longest-s 600 -n 3 --dist loadfile \\
        --no-loadscope-reorder -m "not soak" tests
    python -m tests.cover F     # writes benchmarks/tests/each_change.json

A place is an operator, constant or condition that `tests.mutants` can change. What has turns or is dear
(`tests/turns.py`) may come with a later change only as far as others reach the same places. A test counts as it runs
with all of its cases: where cases inside have turns, a change may reach less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests import turns

CHEAP_S = 3.0  # a test that takes no longer comes where it is the second one that reaches a place
LEAST = 0.2  # places a second that a test alone reaches: what reaches fewer keeps its turns
START_S = 0.05  # of any test, however short


def cover(places: Mapping[str, Collection[int]], seconds: Mapping[str, float], always: Collection[str]) -> list[str]:
    """The tests, besides ``always``, with which each change reaches the places; twice, where cheap ones do. Greedily.

    ``places`` are those that a test reaches. A test is not worth its seconds where it adds fewer than `LEAST`.
    """
    missing = dict.fromkeys((place for found in places.values() for place in found), 1)
    left = {test: set(found) for test, found in places.items()}

    def take(test: str) -> None:
        for place in left.pop(test, ()):
            missing[place] -= 1

    def worth(test: str) -> tuple[float, str]:
        return sum(missing[place] > 0 for place in left[test]) / (START_S + seconds[test]), test

    def choose() -> Iterator[str]:
        while left and worth(best := max(left, key=worth))[0] >= LEAST:
            take(best)
            yield best

    for test in always:
        take(test)
    chosen = [*choose()]
    missing = {place: number + 1 for place, number in missing.items()}
    left = {test: found for test, found in left.items() if seconds[test] <= CHEAP_S}
    return sorted([*chosen, *choose()])


def reached(document: dict[str, Any]) -> dict[str, set[int]]:
    """The places that each test has reached; tests that failed are left out."""
    places: dict[str, set[int]] = defaultdict(set)
    for number, row in enumerate(document["mutants"]):
        for test in row["tests"]:
            places[test].add(number)
    return places


def of_each_change() -> set[str]:
    """The tests that come with every change, whatever its turn, and would without a cover."""
    found = [_collected(str(turn)) for turn in (0, 1, turns.OTHER_TURNS)]  # what has turns is not in all of these
    return set.intersection(*found)


def _collected(turn: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests"]
    variables = {**os.environ, turns.VARIABLE: turn, turns.SELECTED: turns.UNCOVERED}
    text = subprocess.run(command, cwd=turns.ROOT, capture_output=True, text=True, check=True, env=variables).stdout
    return {line for line in text.splitlines() if "::" in line}


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that `tests.mutants reach` was given")
    given = parser.parse_args()
    document = json.loads((given.folder / "reach.json").read_text())
    places, seconds = reached(document), document["seconds"]
    always = of_each_change()
    chosen = cover(places, seconds, always & places.keys())
    before = set().union(*(places[test] for test in always & places.keys()))
    after = set().union(before, *(places[test] for test in chosen))
    turns.COVER.write_text(json.dumps(chosen, indent=1) + "\n")
    print(
        f"{len(places)} tests reach {len(set().union(*places.values()))} places; {len(before)} are reached with each "
        f"change, {len(after)} with {len(chosen)} tests more ({sum(seconds[test] for test in chosen):.0f} s)"
    )


if __name__ == "__main__":
    main()
