"""Problems with injected solutions that one core makes in a second of processor time, at BRIDGE's own size (15-20
operations); beside us, in turns, BRIDGE's generator where a checkout of its repository is given.

Prints one JSON line. Usage: python bench/igsm.py [--peer CHECKOUT] [--rows ROWS]

The peer keeps a problem whose answer is below 1,000, as its dataset script does; ours is counted by rows too, every one
solved again by our solver. With a peer, our solver also answers the peer's problems: `peer_solved` counts the right
answers, `peer_wrong` the wrong ones, and the rest can be read in two ways. Where the checkout lacks the word list
(`utils/english.py`), names of the same number and shape stand in for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType

from bridge.behaviors import writer
from bridge.config.stages import BEHAVIORS
from bridge.config.tasks import IgsmSettings
from bridge.tasks.igsm.solver import UnsolvableError, solve
from bridge.tasks.igsm.task import Igsm

ROUNDS = 5
PEER_SHARE = 5  # the peer is slower: so many times fewer rows


def ours(rows: int, seed: int) -> None:
    task = IgsmSettings(name="igsm")
    for _ in Igsm(task).rows("sft", rows, seed, writer(BEHAVIORS["bridge"], task.style)):
        pass


def load_peer(checkout: Path) -> Callable[[int, int], list[tuple[str, int]]]:
    """The peer's generator: (rows, seed) → questions and answers."""
    package = next((p for p in (checkout / "iGSM-reasoning", checkout) if (p / "igsm_reasoning").is_dir()), None)
    if package is None:
        raise SystemExit(f"{checkout}: holds no folder iGSM-reasoning/igsm_reasoning")
    sys.path.insert(0, str(package))
    if not (package / "igsm_reasoning" / "utils" / "english.py").is_file():
        words = ModuleType("igsm_reasoning.utils.english")
        words.english_dict = stand_in()  # type: ignore[attr-defined]
        sys.modules[words.__name__] = words
    from igsm_reasoning.generation import ProblemGenerator  # type: ignore[import-not-found]

    def make(rows: int, seed: int) -> list[tuple[str, int]]:
        config = {"reflection_prob": 0.1, "analysis_prob_list": [0, 0.1, 0.4, 0.8] + [1] * 7}
        generator = ProblemGenerator({**config, "detailed_computation": True, "rng_range": 10}, seed=seed)
        kept: list[tuple[str, int]] = []
        while len(kept) < rows:
            if generator.draw_question():
                question = generator.generate_question()
                generator.generate_cot_answer()
                if abs(answer := generator.Gd.topo[-1].value) < 1000:
                    kept.append((question, answer))
        return kept

    return make


def stand_in() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Three families of four categories, each with five kinds of five names."""
    families = [
        ("District", "Supermarket", "Product", "Ingredient"),
        ("Zoo", "Enclosure", "Animal", "Bone"),
        ("School", "Classroom", "Backpack", "Stationery"),
    ]
    words = ("Northern", "Little", "Golden", "Painted", "Quiet")
    kinds = ("Alder", "Birch", "Cedar", "Elm", "Fir")
    return {
        family[0]: {
            category: {f"{kind} {category}": [f"{word} {kind} {category[:3]}" for word in words] for kind in kinds}
            for category in family
        }
        for family in families
    }


def rate(work: Callable[[], object], rows: int) -> float:
    start = time.process_time()
    work()
    return rows / (time.process_time() - start)


def solved(problems: list[tuple[str, int]]) -> tuple[int, int]:
    """How many of the peer's problems our solver answers rightly, and how many wrongly."""
    right = wrong = 0
    for question, answer in problems:
        try:
            found = solve(question)
        except UnsolvableError:
            continue
        right += found == answer
        wrong += found != answer
    return right, wrong


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--peer", type=Path, help="a checkout of BRIDGE's repository")
    options.add_argument("--rows", type=int, default=2000)
    chosen = options.parse_args()
    peer = load_peer(chosen.peer) if chosen.peer else None
    fewer = max(chosen.rows // PEER_SHARE, 1)
    ours(200, 0)
    mine, theirs, problems = [], [], []
    for seed in range(1, ROUNDS + 1):
        mine.append(rate(lambda seed=seed: ours(chosen.rows, seed), chosen.rows))  # type: ignore[misc]
        if peer:
            theirs.append(rate(lambda seed=seed: problems.extend(peer(fewer, seed)), fewer))  # type: ignore[misc]
    result: dict[str, object] = {"bench": "igsm", "rows_per_cpu_second": round(median(mine))}
    if peer:
        right, wrong = solved(problems)
        ratio = median(a / b for a, b in zip(mine, theirs, strict=True))
        result |= {"peer_per_cpu_second": round(median(theirs)), "ratio": round(ratio, 1)}
        result |= {"peer_rows": len(problems), "peer_solved": right, "peer_wrong": wrong}
    else:
        result["peer"] = "absent (--peer CHECKOUT)"
    print(json.dumps(result))


if __name__ == "__main__":
    main()
